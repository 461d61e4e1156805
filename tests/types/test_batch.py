"""The batch itself: what it refuses, what it copies, and which tokens are active."""

import dataclasses

import pytest
import torch
from algorithms.batches import BROKEN, close, ragged, ready, refuses
from torch import Tensor

from posttrain.types import Batch, Terms

PER_TOKEN = (
    *("mask", "attention", "sampler_logprobs", "old_logprobs", "ref_logprobs", "values"),
    *("turn_rewards", "token_rewards", "advantages", "returns", "correction", "weights"),
    *("teacher_logprobs", "divergence", "turns"),
)
PER_SEQUENCE = (
    *("rewards", "valid", "groups", "truncated", "versions", "score_norms", "margins"),
    "greedy_rewards",
)
BOOLEAN = ("mask", "attention", "valid", "truncated")
FLOATING = (*PER_TOKEN[2:-1], "rewards", "score_norms", "margins", "greedy_rewards")


def tiny() -> Batch:
    return Batch(tokens=torch.zeros(2, 3), mask=torch.ones(2, 3).bool())


def of_type(name: str, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool if name in BOOLEAN else torch.float64)


def full() -> Batch:
    """A batch that carries every field."""
    batch = ready()
    values = batch.need("values")
    return batch.replace(correction=values.exp(), weights=values.square())


def test_the_fields_of_the_tests_are_all_the_fields() -> None:
    names = {field.name for field in dataclasses.fields(Batch)}
    assert names == {"tokens", "baseline", *PER_TOKEN, *PER_SEQUENCE}
    assert all(getattr(full(), name) is not None for name in names)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_field_of_the_wrong_shape_is_refused(name: str) -> None:
    with refuses(f"{name}: expected shape [2, 3] to match tokens [2, 3], got [2, 2]"):
        tiny().replace(**{name: of_type(name, 2, 2)})
    tiny().replace(**{name: of_type(name, 2, 3)})


@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_a_field_of_the_wrong_length_is_refused(name: str) -> None:
    with refuses(f"{name}: expected shape [2] to match tokens [2, 3], got [3]"):
        tiny().replace(**{name: of_type(name, 3)})
    tiny().replace(**{name: of_type(name, 2)})


def test_the_baseline_is_one_number() -> None:
    with refuses("baseline: expected shape [] to match tokens [2, 3], got [2]"):
        tiny().replace(baseline=torch.zeros(2))
    with refuses("baseline: expected a floating tensor, got torch.int64"):
        tiny().replace(baseline=torch.tensor(1))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1)])
def test_tokens_have_two_dimensions(shape: tuple[int, ...]) -> None:
    with refuses(f"tokens: expected shape [B, T], got {list(shape)}"):
        Batch(tokens=torch.zeros(shape), mask=torch.ones(shape).bool())


@pytest.mark.parametrize("name", BOOLEAN)
def test_marks_are_bool(name: str) -> None:
    shape = (2, 3) if name in PER_TOKEN else (2,)
    with refuses(f"{name}: expected a bool tensor, got torch.int64"):
        tiny().replace(**{name: torch.ones(shape, dtype=torch.int64)})


@pytest.mark.parametrize("name", FLOATING)
def test_numbers_are_floating(name: str) -> None:
    """Whole numbers would make whole numbers of the advantages: 0.5 would be 0."""
    shape = (2, 3) if name in PER_TOKEN else (2,)
    with refuses(f"{name}: expected a floating tensor, got torch.int64"):
        tiny().replace(**{name: torch.ones(shape, dtype=torch.int64)})


def test_active_tokens_are_chosen_and_not_broken() -> None:
    batch = ragged()
    assert batch.active[BROKEN].tolist() == [False] * 10
    others = torch.arange(12) != BROKEN
    assert batch.active[others].tolist() == batch.mask[others].tolist()
    assert batch.replace(valid=None).active.tolist() == batch.mask.tolist()


def test_the_floating_type_is_that_of_the_log_probs_then_of_the_rewards() -> None:
    half = torch.zeros(2, 3, dtype=torch.float16)
    brain = torch.zeros(2, 3, dtype=torch.bfloat16)
    rewards = torch.zeros(2, dtype=torch.float64)
    batch = tiny()
    assert batch.dtype == torch.float32
    assert batch.replace(rewards=rewards).dtype == torch.float64
    assert batch.replace(rewards=rewards, sampler_logprobs=brain).dtype == torch.bfloat16
    batch = batch.replace(rewards=rewards, sampler_logprobs=brain, old_logprobs=half)
    assert batch.dtype == torch.float16


def test_need_returns_the_very_tensor() -> None:
    batch = ragged()
    assert batch.need("rewards") is batch.rewards


def test_replace_leaves_the_original_alone() -> None:
    batch = ragged()
    rewards = torch.ones(12)
    changed = batch.replace(rewards=rewards, groups=None)
    assert changed.rewards is rewards
    assert changed.groups is None
    assert batch.rewards is not rewards
    assert batch.groups is not None
    assert changed.tokens is batch.tokens


@pytest.mark.parametrize("name", ["tokens", *PER_TOKEN, *PER_SEQUENCE])
def test_select_takes_rows_of_every_field(name: str) -> None:
    batch, rows = full(), [7, 0, 7, 11]
    picked = batch.select(torch.tensor(rows))
    field = getattr(batch, name).nan_to_num(99)
    assert getattr(picked, name).nan_to_num(99).tolist() == [field[row].tolist() for row in rows]
    assert picked.baseline is batch.baseline
    odd = batch.select(torch.arange(12) % 2 == 1)
    assert getattr(odd, name).nan_to_num(99).tolist() == field[1::2].tolist()


def test_select_keeps_missing_fields_missing() -> None:
    picked = tiny().select(torch.tensor([1]))
    assert picked.rewards is None
    assert picked.tokens.shape == (1, 3)


def test_to_moves_every_field() -> None:
    moved = full().to("meta")
    for field in dataclasses.fields(Batch):
        assert getattr(moved, field.name).device.type == "meta"
    assert tiny().to(torch.device("meta")).mask.device.type == "meta"


def test_from_rewards_makes_sequences_of_one_token() -> None:
    batch = Batch.from_rewards([1.0, 0.25, 3.0], groups=[4, 4, 2])
    close(batch.need("rewards"), [1.0, 0.25, 3.0], rtol=0)
    assert batch.need("groups").tolist() == [4, 4, 2]
    assert batch.mask.tolist() == [[True], [True], [True]]
    assert batch.tokens.tolist() == [[0], [0], [0]]
    assert Batch.from_rewards([1, 2]).need("groups").tolist() == [0, 0]
    assert Batch.from_rewards(torch.tensor([1, 2])).need("rewards").dtype == torch.float64
    with refuses("rewards: expected shape [B], got [1, 2]"):
        Batch.from_rewards(torch.zeros(1, 2))
    with refuses("groups: expected shape [2] to match tokens [2, 1], got [1]"):
        Batch.from_rewards([1.0, 2.0], groups=[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_from_tensors_makes_a_batch_of_a_mask_and_what_else_is_given(dtype: torch.dtype) -> None:
    """Nothing that is not given is made up, but for tokens that no vocabulary has."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=dtype)
    rewards, groups = torch.tensor([1.0, 0.5]), torch.tensor([3, 3])
    batch = Batch.from_tensors(mask, rewards=rewards, groups=groups)
    assert batch.mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.tokens.tolist() == [[-1, -1, -1], [-1, -1, -1]]
    assert batch.tokens.dtype == torch.long
    assert batch.rewards is rewards
    assert batch.groups is groups
    given = {"tokens", "mask", "rewards", "groups"}
    for field in dataclasses.fields(Batch):
        assert (getattr(batch, field.name) is not None) == (field.name in given)


def test_from_tensors_takes_tokens_where_there_are_some_and_refuses_what_does_not_fit() -> None:
    mask, tokens = torch.ones(2, 3), torch.arange(6).view(2, 3)
    assert Batch.from_tensors(mask, tokens=tokens).tokens is tokens
    assert Batch.from_tensors(mask.to("meta")).tokens.device.type == "meta"
    with refuses("mask: expected shape [B, T], got [3]"):
        Batch.from_tensors(torch.ones(3))
    with refuses("rewards: expected shape [2] to match tokens [2, 3], got [3]"):
        Batch.from_tensors(mask, rewards=torch.zeros(3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reward'"):
        Batch.from_tensors(mask, reward=torch.zeros(2))


def test_no_model_takes_the_place_of_tokens_for_tokens() -> None:
    batch = Batch.from_tensors(torch.ones(1, 2))
    with pytest.raises(IndexError):
        torch.nn.Embedding(5, 2)(batch.tokens)


def test_a_batch_is_frozen_and_terms_start_without_reports() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().rewards = torch.zeros(2)
    terms = Terms(loss=torch.zeros(1, 1))
    assert (dict(terms.means), dict(terms.maxima)) == ({}, {})
