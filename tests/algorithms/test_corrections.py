"""Importance correction for sampler-trainer mismatch, against plain loops."""

import math
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import chosen, close, ragged, refuses
from torch import Tensor

from posttrain.algorithms.corrections import CORRECTIONS, Level, masked, truncated
from posttrain.types import Batch


def test_the_table_holds_both_corrections() -> None:
    assert {"truncated": truncated, "masked": masked} == CORRECTIONS


def ratios(batch: Batch, level: Level) -> Tensor:
    """π_old / π_sampler of the token, of the whole sequence, or its geometric mean, by loops."""
    old, sampler = batch.need("old_logprobs"), batch.need("sampler_logprobs")
    result = torch.zeros_like(old)
    for row in range(12):
        columns = chosen(batch, row)
        steps = [float(old[row, column] - sampler[row, column]) for column in columns]
        for column, step in zip(columns, steps, strict=True):
            exponent = {
                "token": step,
                "sequence": math.fsum(steps),
                "geometric": math.fsum(steps) / len(steps),
            }[level]
            result[row, column] = math.exp(exponent)
    return result


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("cap", [2.0, 1.1])
def test_truncated_caps_the_ratio(level: Level, cap: float) -> None:
    batch = ragged()
    expected = ratios(batch, level)
    assert (expected > cap).any()
    close(truncated(batch, cap=cap, level=level).need("correction"), expected.clamp(max=cap))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("low", [0.8, 0.9])
def test_truncated_raises_the_ratio_to_its_lower_bound(level: Level, low: float) -> None:
    batch = ragged()
    expected = ratios(batch, level)
    assert ((expected < low) & batch.active).any()
    assert (expected > 1.2).any()
    made = truncated(batch, cap=1.2, low=low, level=level).need("correction")
    close(made, expected.clamp(low, 1.2) * batch.active)


def test_both_bounds_by_hand() -> None:
    """π_old / π_sampler of 0.9 / 0.3 = 3, 0.1 / 0.4 = 1/4 and 0.3 / 0.4 = 3/4, in [1/2, 2]."""
    batch = Batch.from_rewards([0.0] * 3).replace(
        old_logprobs=torch.tensor([[0.9], [0.1], [0.3]], dtype=torch.float64).log(),
        sampler_logprobs=torch.tensor([[0.3], [0.4], [0.4]], dtype=torch.float64).log(),
    )
    close(truncated(batch, low=0.5).need("correction"), [[2.0], [0.5], [0.75]])
    close(truncated(batch).need("correction"), [[2.0], [0.25], [0.75]])  # none from below
    close(masked(batch).need("correction"), [[0.0], [0.0], [0.75]])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.9, 1.2), (0.0, 1.0)])
def test_masked_drops_what_is_out_of_range(level: Level, low: float, high: float) -> None:
    batch = ragged()
    expected = ratios(batch, level)
    inside = (expected >= low) & (expected <= high)
    made = masked(batch, low=low, high=high, level=level).need("correction")
    close(made, expected.where(inside, 0.0))


def test_corrections_by_default_look_at_tokens_between_a_half_and_two() -> None:
    batch = ragged()
    expected = ratios(batch, "token")
    close(truncated(batch).need("correction"), expected.clamp(max=2.0))
    inside = (expected >= 0.5) & (expected <= 2.0)
    close(masked(batch).need("correction"), expected.where(inside, 0.0))


def test_the_bounds_themselves_are_inside() -> None:
    batch = Batch.from_rewards([0.0]).replace(
        old_logprobs=torch.zeros(1, 1), sampler_logprobs=torch.zeros(1, 1)
    )
    assert masked(batch, low=1.0, high=1.0).need("correction").tolist() == [[1.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("step", [20.0, 25.0, 900.0])
def test_absurd_ratios_stay_finite(level: Level, step: float) -> None:
    batch = Batch.from_rewards([0.0, 0.0]).replace(
        old_logprobs=torch.tensor([[step], [-step]]).double(),
        sampler_logprobs=torch.zeros(2, 1).double(),
    )
    made = truncated(batch, cap=1e12, level=level).need("correction")
    close(made, [[math.exp(20.0)], [math.exp(-20.0)]])


@pytest.mark.parametrize("correct", [truncated, masked])
def test_a_correction_carries_no_gradient(correct: Callable[..., Batch]) -> None:
    batch = ragged()
    batch = batch.replace(old_logprobs=batch.need("old_logprobs").requires_grad_())
    assert not correct(batch).need("correction").requires_grad


@pytest.mark.parametrize("correct", [truncated, masked])
def test_agreement_needs_no_correction(correct: Callable[..., Batch]) -> None:
    batch = ragged()
    batch = batch.replace(sampler_logprobs=batch.need("old_logprobs"))
    for level in ("token", "sequence", "geometric"):
        close(correct(batch, level=level).need("correction"), batch.active.double(), rtol=0)


def test_bad_corrections_are_refused() -> None:
    batch = ragged()
    with refuses("cap: must be > 0, got 0.0"):
        truncated(batch, cap=0.0)
    with refuses("low: must be >= 0 and <= 1, got -0.1"):
        truncated(batch, low=-0.1)
    with refuses("low: must be >= 0 and <= 1, got 1.5"):
        truncated(batch, low=1.5)
    with refuses("low: must be >= 0 and <= 0.5, got 0.6"):
        truncated(batch, cap=0.5, low=0.6)
    with refuses("low: must be >= 0 and <= 1, got -0.1"):
        masked(batch, low=-0.1)
    with refuses("low: must be >= 0 and <= 1, got 1.5"):
        masked(batch, low=1.5)
    with refuses("high: must be >= 1, got 0.9"):
        masked(batch, high=0.9)
    for correct in (truncated, masked):
        with refuses("level: unknown 'row'; choose one of token, sequence, geometric"):
            correct(batch, level="row")
        with refuses(
            "sampler_logprobs: this batch has none; it is added by collate (from the engine)"
        ):
            correct(batch.replace(sampler_logprobs=None))
