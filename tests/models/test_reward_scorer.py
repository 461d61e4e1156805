"""ModelScorer and Frozen: the scores of plain forward passes, one load, and no way back."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from models.families import build
from small_model import parameters, small_model
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from posttrain.fast.score import score_tokens
from posttrain.models.frozen import Frozen
from posttrain.models.load import load_policy
from posttrain.models.reward import RewardModel, reward_from_policy
from posttrain.models.reward_scorer import ModelScorer, pad_rows
from posttrain.models.tiny import build_tokenizer
from posttrain.types import Batch, Prompt, Rollout, Turn

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 12}
ROWS = [(5, 6, 7), (8, 0), tuple(range(20, 31)), (9, 10, 11, 1), (12, 13, 14)]


def reward_model() -> RewardModel:
    """A model in float64 with room for 12 tokens, and a normalisation."""
    owner = load_policy("tiny", seed=4, options=SMALL, dtype="float64")
    return replace(reward_from_policy(owner, seed=1), mean=0.25, deviation=0.5)


def rollout(row: Sequence[int]) -> Rollout:
    """Its first token is the prompt."""
    tokens = tuple(row[1:])
    completion = Turn(
        tokens=tokens, logprobs=(0.0,) * len(tokens), text="", stop_reason="stop", version=0
    )
    return Rollout(
        prompt=Prompt(id="", text="", tokens=tuple(row[:1])), turns=(completion,), group=0
    )


def read(reward: RewardModel, given: Rollout) -> tuple[int, ...]:
    return (*given.prompt.tokens, *given.tokens)


def scorer(reward: RewardModel, **options: object) -> ModelScorer:
    return ModelScorer(lambda: reward, render=read, **options)


def naive(reward: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """The raw score of each row by itself, by the model's own forward pass on one row."""
    with torch.no_grad():
        states = [reward.model.base_model(torch.tensor([row])).last_hidden_state for row in rows]
        return [reward.head(state[0, -1]).item() for state in states]


class Counting(nn.Module):
    """Stands before a trunk and writes down the shape of what it is asked."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: torch.Tensor, **others: object) -> object:
        self.shapes.append(tuple(input_ids.shape))
        return self.trunk(input_ids=input_ids, **others)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("micro_batch_tokens", "shapes"),
    [
        (1, [(1, 11), (1, 4), (1, 3), (1, 3), (1, 2)]),
        (12, [(1, 11), (3, 4), (1, 2)]),
        (10_000, [(5, 11)]),
    ],
)
def test_scores_come_in_order_whatever_fits_a_forward_pass(
    micro_batch_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    """Normalised as (raw − 0.25) / 0.5, longest rows first; the raw score where told."""
    reward = reward_model()
    expected = naive(reward, ROWS)
    assert min(abs(a - b) for n, a in enumerate(expected) for b in expected[:n]) > 1e-3
    counting = Counting(reward.model.model)
    reward.model.model = counting
    options = {"micro_batch_tokens": micro_batch_tokens}
    found = scorer(reward, **options).score([rollout(row) for row in ROWS])
    assert all(score.ok for score in found)
    wanted = [(raw - 0.25) / 0.5 for raw in expected]
    assert [score.value for score in found] == pytest.approx(wanted, rel=1e-12, abs=1e-13)
    assert counting.shapes == shapes
    plain = scorer(reward, normalise=False, **options).score([rollout(row) for row in ROWS])
    assert [score.value for score in plain] == pytest.approx(expected, rel=1e-12, abs=1e-13)


@pytest.mark.usefixtures("float64_throughout")
def test_what_does_not_fit_the_context_is_invalid_and_spares_the_others() -> None:
    """Twelve tokens fit, thirteen do not, and nothing at all cannot be scored."""
    reward = reward_model()
    rows = [tuple(range(20, 33)), (5, 6), tuple(range(20, 32))]
    long, short, full = scorer(reward).score([rollout(row) for row in rows])
    assert (long.state, long.value) == ("invalid", 0.0)
    assert long.reason == "gave nan for 13 tokens (its context is 12)"
    wanted = [(raw - 0.25) / 0.5 for raw in naive(reward, rows[1:])]
    assert [short.value, full.value] == pytest.approx(wanted, rel=1e-12)
    assert short.ok
    assert full.ok
    (empty,) = scorer(reward).score([rollout(())])
    assert (empty.state, empty.reason) == ("invalid", "gave nan for 0 tokens (its context is 12)")
    assert scorer(reward).score([]) == []


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_weights_give_invalid_scores(broken: float) -> None:
    reward = reward_model()
    with torch.no_grad():
        reward.head.weight[0, 0] = broken
    found = scorer(reward).score([rollout(row) for row in ROWS])
    assert {score.state for score in found} == {"invalid"}
    assert {score.value for score in found} == {0.0}
    assert all("gave" in score.reason for score in found)


def test_the_model_is_loaded_once_and_not_before_it_is_needed() -> None:
    loads: list[RewardModel] = []

    def load() -> RewardModel:
        loads.append(reward_model())
        return loads[-1]

    lazy = ModelScorer(load, render=read)
    assert not loads
    first = lazy.score([rollout(ROWS[0])])
    assert lazy.reward is loads[0]
    assert lazy.score([rollout(ROWS[0])]) == first
    assert len(loads) == 1


def test_offload_on_a_cpu_is_harmless() -> None:
    given = [rollout(row) for row in ROWS]
    kept, away = scorer(reward_model()), scorer(reward_model(), offload=True)
    assert away.score(given) == kept.score(given) == away.score(given)


@pytest.mark.parametrize(("pad", "sizes"), [(None, [1, 1, 1]), (0, [3])])
def test_a_model_that_cannot_tell_padding_is_asked_one_row_at_a_time(
    pad: int | None, sizes: list[int]
) -> None:
    """One with a layer of its own for the score, that is, and no pad token."""
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "vocab_size": 106}
    config = DistilBertConfig(num_labels=1, pad_token_id=pad, max_position_embeddings=12, **shape)
    model = DistilBertForSequenceClassification(config)
    asked_for: list[int] = []
    model.register_forward_hook(
        lambda _, __, output: asked_for.append(len(output.logits)), always_call=True
    )
    made = RewardModel(model=model, tokenizer=build_tokenizer(), source="", pad_token=0)
    found = scorer(made).score([rollout(row) for row in ROWS[:3]])
    assert asked_for == sizes
    with torch.no_grad():
        alone = [model(torch.tensor([row])).logits.item() for row in ROWS[:3]]
    assert [score.value for score in found] == pytest.approx(alone, rel=1e-4)


def test_rows_are_padded_on_the_right_and_masked_at_their_last_token() -> None:
    batch = pad_rows([(5, 6, 7), (8,), (0, 0)], 0)
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert batch.attention.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert batch.mask.nonzero().tolist() == [[0, 2], [1, 0], [2, 1]]


def asked(frozen: Frozen, batch: Batch) -> torch.Tensor:
    with frozen.on_device() as model:
        return score_tokens(model, batch).logprobs


BATCH = Batch(tokens=torch.tensor([[5, 6, 7, 8]]), mask=torch.tensor([[False, True, True, True]]))


def test_a_frozen_copy_stays_what_it_was() -> None:
    """The model it was made of trains on, and keeps its gradients."""
    model = small_model()
    before = score_tokens(model, BATCH).logprobs.detach()
    frozen = Frozen.copy_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    score_tokens(model, BATCH).logprobs.sum().backward()
    optimizer.step()
    assert torch.equal(asked(frozen, BATCH), before)
    moved = score_tokens(model, BATCH).logprobs.detach() - before
    assert float(moved.abs().max()) > 1e-3


def test_asking_leaves_no_gradient() -> None:
    """Neither in the answer nor in the weights, even where gradients are asked for outside."""
    model = small_model().train()
    frozen = Frozen.copy_of(model)
    with torch.enable_grad(), frozen.on_device() as inside:
        assert not torch.is_grad_enabled()
        assert not score_tokens(inside, BATCH).logprobs.requires_grad
        assert not any(weight.requires_grad for weight in inside.parameters())
        assert not inside.training
    assert torch.is_grad_enabled()
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_copy_in_half_precision_keeps_its_rotary_frequencies() -> None:
    """Weights are rounded, buffers are not, and the model that was copied is left alone."""
    model = build("llama", dtype=torch.float32)
    before = parameters(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert "model.rotary_emb.inv_freq" in buffers
    with Frozen.copy_of(model, dtype=torch.bfloat16, offload=True).on_device() as copied:
        assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
        assert torch.equal(parameters(copied), before.bfloat16())
        for name, buffer in copied.named_buffers():
            assert torch.equal(buffer, buffers[name])
            assert buffer.dtype == buffers[name].dtype
    assert torch.equal(parameters(model), before)


def test_without_a_dtype_the_weights_stay_as_they_are() -> None:
    with Frozen.copy_of(small_model()).on_device() as copied:
        assert torch.equal(parameters(copied), parameters(small_model()))
