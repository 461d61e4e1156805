"""Supervised training: it memorises, it counts its steps, and prompts are never learned."""

import pytest
import torch
from small_model import naive_logprobs, small_model

from posttrain.algorithms.weights import token_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.fit import fit, num_steps
from posttrain.pipelines.likelihood import Row, batches, held_out_loss, likelihood
from posttrain.types import Batch

END = 1


def row(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Row:
    tokens = (*prompt, *completion, END)
    return tokens, [False] * len(prompt) + [True] * (len(completion) + 1)


ROWS = [row((5,), (6, 7)), row((8, 9), (10,)), row((11, 5, 6), (12, 13, 14)), row((7,), ())]


def learner(model: torch.nn.Module, rate: float = 1e-2) -> LocalLearner:
    return LocalLearner(model, adamw(model, learning_rate=rate), save=lambda folder: None)


def test_four_sequences_are_memorised() -> None:
    """The loss of every completion token falls to almost nothing, and the log says so."""
    model = small_model()
    log: list[tuple[int, float]] = []
    student = learner(model)
    fit(
        batches(ROWS, 4, steps=60, pad_token=0, seed=0),
        student,
        objective=likelihood,
        on_step=lambda fitted: log.append((fitted.step, fitted.metrics()["loss/total"])),
    )
    assert [step for step, _ in log] == [*range(1, 61)]
    assert log[0][1] > 4
    batch = collate_demonstrations(ROWS, pad_token=0)
    with torch.no_grad():
        assert float(naive_logprobs(model, batch).min()) > -0.2
    assert student.version == 60


def test_the_first_loss_is_the_mean_over_completion_tokens() -> None:
    """Every token counts the same, whatever the length of its sequence."""
    model = small_model()
    batch = collate_demonstrations(ROWS, pad_token=0)
    with torch.no_grad():
        expected = -float(naive_logprobs(model, batch).sum() / batch.mask.sum())
    result = learner(model).step(token_mean(batch), likelihood)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert int(batch.mask.sum()) == 3 + 2 + 4 + 1


@pytest.mark.usefixtures("float64_throughout")
def test_prompt_tokens_are_context_and_never_targets() -> None:
    """The gradient is that of the completion's log-likelihood alone, to the last digits."""
    batch = collate_demonstrations(ROWS[:3], pad_token=0)
    model, mine = small_model(), small_model()
    learner(model).step(token_mean(batch), likelihood)
    (-naive_logprobs(mine, batch).sum() / batch.mask.sum()).backward()
    factor = min(1.0, 1.0 / float(gradients(mine).norm()))  # the learner clips at 1
    assert torch.allclose(gradients(model), factor * gradients(mine), rtol=1e-5, atol=1e-9)
    whole = batch.replace(mask=batch.attention & (torch.arange(batch.tokens.shape[1]) > 0))
    other = small_model()
    learner(other).step(token_mean(whole), likelihood)
    assert not torch.allclose(gradients(model), gradients(other), rtol=0.1)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_every_row_once_each_epoch_in_an_order_of_the_seed() -> None:
    """The last batch may be smaller; equal seeds give equal batches."""

    def epochs(seed: int) -> list[list[tuple[int, ...]]]:
        made = list(batches(ROWS, 3, steps=4, pad_token=0, seed=seed))
        assert [len(batch.tokens) for batch in made] == [3, 1, 3, 1]
        lines = [
            tuple(tokens[real].tolist())
            for batch in made
            for tokens, real in zip(batch.tokens, batch.attention, strict=True)
        ]
        return [lines[:4], lines[4:]]

    whole = sorted(tuple(tokens) for tokens, _ in ROWS)
    first, second = epochs(0)
    assert sorted(first) == sorted(second) == whole
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1) != [first, second]
    assert num_steps(4, 3, epochs=2) == 4


class Known:
    """A learner that knows the log-prob of every token: minus its number."""

    def infer(self, batch: Batch) -> Batch:
        return batch.replace(old_logprobs=-batch.tokens.double())


def test_the_held_out_loss_is_the_mean_over_completion_tokens() -> None:
    """Tokens 6, 7, 1 | 10, 1 | 12, 13, 14, 1 | 1: 14 + 11 + 40 + 1 = 66, of 10 tokens.

    Not the mean of the means of the rows, which is (14/3 + 11/2 + 10 + 1) / 4 = 5.29…, and
    not over prompts or padding.
    """
    assert held_out_loss(ROWS, Known(), pad_token=99) == pytest.approx(6.6, rel=1e-12)
    assert held_out_loss(ROWS[::-1], Known(), pad_token=0) == pytest.approx(6.6, rel=1e-12)


def test_micro_batches_do_not_change_the_held_out_loss_and_it_changes_nothing() -> None:
    """In float64, one row at a time and all together; weights, gradients and optimiser stay."""
    model = small_model().double()
    found = []
    for tokens in (1, 8, 1000):
        optimizer = adamw(model, learning_rate=1e-2)
        student = LocalLearner(
            model, optimizer, save=lambda folder: None, micro_batch_tokens=tokens
        )
        before = [weight.detach().clone() for weight in model.parameters()]
        found.append(held_out_loss(ROWS, student, pad_token=0))
        assert all(map(torch.equal, before, model.parameters()))
        assert all(weight.grad is None for weight in model.parameters())
        assert not optimizer.state
        assert student.version == 0
    batch = collate_demonstrations(ROWS, pad_token=0)
    with torch.no_grad():
        expected = -float(naive_logprobs(model, batch).sum() / batch.mask.sum())
    assert found == pytest.approx([expected] * 3, rel=1e-12)
