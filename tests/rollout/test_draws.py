"""Randomness belongs to the sequence, and completions end where their first end token stands."""

import math

import pytest
import torch
from rollout.cases import spell

from posttrain.rollout.engines.draws import Draws, uniforms
from posttrain.types import Sampling


def test_a_number_depends_on_seed_sequence_and_step_alone() -> None:
    whole = uniforms(5, sequences=range(40), num_steps=30)
    part = uniforms(5, sequences=[31, 2, 17], num_steps=12)
    assert torch.equal(part, whole[[31, 2, 17], :12])
    assert not torch.equal(uniforms(6, sequences=range(40), num_steps=30), whole)
    negative = uniforms(-1, sequences=[0], num_steps=4)
    assert not torch.equal(negative, uniforms(1, sequences=[0], num_steps=4))


def test_numbers_are_uniform_and_independent() -> None:
    numbers = uniforms(0, sequences=range(500), num_steps=40)
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert 4.2 < ((counts - 1000).square() / 1000).sum() < 46  # chi-square, 19 degrees, 99.9 %
    centred = numbers - 0.5
    for lagged in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(lagged.mean() * 12) < 4 / lagged.numel() ** 0.5


def test_rows_are_recorded_where_they_belong() -> None:
    sampling = Sampling(max_new_tokens=3)
    draws = Draws(sampling, torch.full((3, 3), 0.5), end_tokens=(0,))
    certain = torch.full((3, 5), -torch.inf)
    certain[[0, 1, 2], [4, 0, 2]] = 0.0  # the second sequence ends at once
    assert draws.draw(certain, torch.tensor([0, 1, 2])).tolist() == [4, 0, 2]
    assert draws.ended.tolist() == [False, True, False]
    even = torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    rows = torch.tensor([2, 0])  # the ended one has left, and the order has changed
    assert draws.draw(even, rows).tolist() == [3, 3]
    assert not draws.full
    draws.draw(certain[[1, 2]], rows)
    assert draws.full
    first, second, third = draws.turns(spell, version=7)
    assert (first.tokens, first.stop_reason, first.text) == ((4, 3, 2), "length", "4 3 2")
    assert (second.tokens, second.stop_reason, second.text) == ((0,), "stop", "")
    assert (third.tokens, third.stop_reason, third.text) == ((2, 3, 0), "stop", "2 3")
    assert first.logprobs == pytest.approx((0.0, math.log(0.5), 0.0))
    assert {first.version, second.version, third.version} == {7}
