"""Reward models: the objective is the naive loop's, the verdict is by hand, and training ranks."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from posttrain.algorithms.weights import total
from posttrain.data.collate import collate_ranked
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.fit import Fitted, fit
from posttrain.pipelines.reward_model import RankedTokens, batches, judge, preference
from posttrain.protocols import Outputs
from posttrain.types import Batch

# Ragged: sets of 2, 4, 3 and 2 completions, rows of different lengths, with and without margins.
SIZES, MARGINS = (2, 4, 3, 2), (0.0, 0.7, 1.5, 0.3)


def batch_of(sizes: tuple[int, ...] = SIZES, margins: tuple[float, ...] = MARGINS) -> Batch:
    """Sets of these sizes; every row has a length of its own."""
    length = itertools.cycle((3, 1, 4, 2, 5))
    sets = [
        ([tuple(range(2, 2 + next(length))) for _ in range(size)], margin)
        for size, margin in zip(sizes, margins, strict=True)
    ]
    return collate_ranked(sets, pad_token=0)


def scores_of(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    size = len(batch.tokens)
    return (3 * torch.randn(size, dtype=torch.float64, generator=generator)).requires_grad_()


def naive(scores: Tensor, sizes: tuple[int, ...], margins: tuple[float, ...]) -> Tensor:
    """Mean over the sets of −Σ_k log P(the k-th is the best of those left)."""
    losses, start = [], 0
    for size, margin in zip(sizes, margins, strict=True):
        members = scores[start : start + size]
        start += size
        loss = scores.new_zeros(())
        for place in range(size - 1):
            wins = torch.exp(members[place] - margin)
            rest = sum(torch.exp(member) for member in members[place + 1 :])
            loss = loss - torch.log(wins / (wins + rest))
        losses.append(loss)
    return sum(losses) / len(losses)


def test_the_objective_is_plackett_luce_of_every_set() -> None:
    """Value and gradient, in float64, on ragged sets with margins."""
    batch = batch_of()
    batch = batch.replace(margins=batch.margins.double(), weights=batch.weights.double())
    scores, other = scores_of(batch), scores_of(batch)
    # What the batch holds in float32 is what the naive loop must be given.
    margins = tuple(float(batch.margins[row]) for row in (0, 2, 6, 9))
    loss = total(preference(Outputs(scores=scores), batch).loss, batch)
    expected = naive(other, SIZES, margins)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    assert torch.allclose(scores.grad, other.grad, rtol=1e-10, atol=1e-14)


def test_of_pairs_it_is_bradley_terry() -> None:
    """−log σ(s₁ − s₂ − m), each with its own margin; a pair's terms stand at its first row."""
    batch = batch_of((2, 2), (0.0, 1.0))
    scores = torch.tensor([0.5, -0.25, 1.0, 3.0], dtype=torch.float64)
    loss = preference(Outputs(scores=scores), batch).loss
    expected = [math.log1p(math.exp(-0.75)), 0.0, math.log1p(math.exp(3.0)), 0.0]
    assert loss.sum(dim=1).tolist() == pytest.approx(expected, rel=1e-12)
    assert bool((loss[~batch.mask] == 0).all())


def test_the_metrics_of_a_batch() -> None:
    """Who wins first place, a tie by half; the lead; and the mean score over all rows."""
    batch = batch_of((2, 2, 2), (0.0, 0.0, 0.0))
    scores = torch.tensor([1.0, 0.0, 2.0, 2.0, 0.0, 4.0], dtype=torch.float64, requires_grad=True)
    means = preference(Outputs(scores=scores), batch).means
    found = {name: float(value[batch.mask].mean()) for name, value in means.items()}
    expected = {"accuracy": 0.5, "margin": -1.0, "score": 1.5}
    assert found == {f"preference/{name}": value for name, value in expected.items()}
    assert not any(value.requires_grad for value in means.values())


def tokens(*lengths: int) -> RankedTokens:
    return RankedTokens(rows=[(1,) * (length + 2) for length in lengths], lengths=lengths)


def test_a_verdict_by_hand() -> None:
    """All pairs of a set count: (2, 0), then (1, 1), (1, −1) and (1, −1)."""
    verdict = judge([tokens(4, 2), tokens(1, 2, 3)], [[2.0, 0.0], [1.0, 1.0, -1.0]])
    assert verdict.num_pairs == 4
    assert verdict.accuracy == (1 + 0.5 + 1 + 1) / 4
    assert verdict.margin == (2 + 0 + 2 + 2) / 4
    loss = (3 * math.log1p(math.exp(-2.0)) + math.log(2)) / 4
    assert verdict.loss == pytest.approx(loss, rel=1e-12)
    # σ(2) three times and ½ once, each both ways: 0.88 against 1, 0.12 against 0, ½ against ½.
    miss = 1 - 1 / (1 + math.exp(-2.0))
    assert verdict.calibration_error == pytest.approx(3 / 4 * miss, rel=1e-9)
    assert [(found.low, found.count) for found in verdict.bins] == [(0.1, 3), (0.5, 2), (0.8, 3)]
    assert verdict.scores.tolist() == [2.0, 0.0, 1.0, 1.0, -1.0]
    # Scores about 0.6, lengths (4, 2, 1, 2, 3) about 2.4.
    scores, lengths = [1.4, -0.6, 0.4, 0.4, -1.6], [1.6, -0.4, -1.4, -0.4, 0.6]
    product = sum(s * n for s, n in zip(scores, lengths, strict=True))
    norms = math.sqrt(sum(s * s for s in scores) * sum(n * n for n in lengths))
    assert verdict.length_correlation == pytest.approx(product / norms, rel=1e-9)


def test_batches_hold_every_set_once_an_epoch() -> None:
    """Shuffled anew each time, by the seed; the last one takes what is left; margins go along."""
    sets = [
        RankedTokens(rows=[(number, 1), (number, 2, 3)], lengths=(1, 2), margin=number / 10)
        for number in range(10, 17)
    ]

    def drawn(seed: int) -> list[list[int]]:
        parts = list(batches(sets, 3, steps=6, pad_token=0, seed=seed))
        for part in parts:
            assert torch.allclose(part.margins, part.tokens[:, 0] / 10)
            assert float(part.weights.sum()) == pytest.approx(1)
        return [part.tokens[::2, 0].tolist() for part in parts]

    first = drawn(1)
    assert [len(part) for part in first] == [3, 3, 1, 3, 3, 1]
    once, again = (list(itertools.chain(*first[start : start + 3])) for start in (0, 3))
    assert sorted(once) == sorted(again) == list(range(10, 17))
    assert once != again
    assert first == drawn(1) != drawn(2)


class Bag(nn.Module):
    """Scores a row by the sum of a number for each of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Embedding(20, 1, dtype=torch.float64)
        nn.init.zeros_(self.worth.weight)

    def ask(self, batch: Batch) -> Outputs:
        return Outputs(scores=(self.worth(batch.tokens)[..., 0] * batch.attention).sum(dim=1))


def separable() -> list[RankedTokens]:
    """Token 11 beats 12 beats 13, whatever the prompt is."""
    return [
        RankedTokens(rows=[(prompt, 11), (prompt, 12), (prompt, 13, prompt)], lengths=(1, 1, 2))
        for prompt in range(1, 9)
    ]


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_training_ranks_what_can_be_ranked(micro_batch_tokens: int) -> None:
    """The loss starts at log 3! and falls; unseen prompts are ranked right; one version is made."""
    model = Bag()
    learner = LocalLearner(
        model,
        adamw(model, learning_rate=0.1),
        save=lambda folder: None,
        forward=lambda model, batch: model.ask(batch),
        keep_groups=True,
        micro_batch_tokens=micro_batch_tokens,
    )
    steps: list[int] = []
    losses: list[float] = []
    accuracies: list[float] = []

    def watch(fitted: Fitted) -> None:
        steps.append(fitted.step)
        losses.append(fitted.metrics()["loss/total"])
        accuracies.append(fitted.metrics()["preference/accuracy"])

    made = batches(separable(), 4, steps=20, pad_token=0, seed=0)
    fit(made, learner, objective=preference, on_step=watch)
    assert steps == list(range(1, 21))
    assert losses[0] == pytest.approx(math.log(6), rel=1e-6)
    assert losses[-1] < 0.3
    assert (accuracies[0], accuracies[-1]) == (0.5, 1.0)
    unseen = torch.tensor([[15, 11], [15, 12], [15, 13]])
    scores = model.worth(unseen)[..., 0].sum(dim=1).tolist()
    assert scores[0] > scores[1] + 1 > scores[2] + 2
    assert learner.version == 20
