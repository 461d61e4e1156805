"""Diagnostics: what is reported for each token, how it adds up, and what moments give."""

import math
import statistics

import pytest
import torch
from algorithms.batches import close, moved, ready, refuses
from torch import Tensor

from posttrain.algorithms.diagnostics import (
    Tally,
    ratio_terms,
    share_without_signal,
    tally,
    value_terms,
)
from posttrain.algorithms.losses import clipped, squared
from posttrain.types import Batch, Terms

TRUE = torch.tensor([[True]])


def float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ratio_terms_by_hand() -> None:
    log_ratio = float64([[2.0, 0.5, 3.0]]).log().requires_grad_()
    low, high = torch.tensor([[False, True, True]]), torch.tensor([[True, False, True]])
    active = torch.tensor([[True, True, False]])
    terms = ratio_terms(log_ratio, low=low, high=high, active=active)
    expected = {
        "ratio": [[2.0, 0.5, 0.0]],
        "ratio_squared": [[4.0, 0.25, 0.0]],
        "approx_kl": [[1 - math.log(2.0), -0.5 + math.log(2.0), 0.0]],
        "clip_low": [[0.0, 1.0, 0.0]],
        "clip_high": [[1.0, 0.0, 0.0]],
    }
    assert list(terms) == list(expected)
    for name, value in expected.items():
        close(terms[name], value)
        assert not terms[name].requires_grad


@pytest.mark.parametrize("step", [0.0, 1e-300, -1e-300, 1e-9, -1e-9])
def test_approx_kl_is_never_negative(step: float) -> None:
    none = ~TRUE
    terms = ratio_terms(float64([[step]]), low=none, high=none, active=TRUE)
    assert terms["approx_kl"].item() >= 0


def test_value_terms_by_hand() -> None:
    values, returns = float64([[1.0, 4.0, 9.0]]).requires_grad_(), float64([[3.0, 2.0, math.nan]])
    clipped_tokens = torch.tensor([[True, False, True]])
    active = torch.tensor([[True, True, False]])
    terms = value_terms(values, returns, clipped=clipped_tokens, active=active)
    expected = {
        "value": [[1.0, 4.0, 0.0]],
        "return": [[3.0, 2.0, 0.0]],
        "return_squared": [[9.0, 4.0, 0.0]],
        "value_error": [[2.0, -2.0, 0.0]],
        "value_error_squared": [[4.0, 4.0, 0.0]],
        "value_clip": [[1.0, 0.0, 0.0]],
    }
    assert list(terms) == list(expected)
    for name, value in expected.items():
        close(terms[name], value, rtol=0)
        assert not terms[name].requires_grad


def test_a_tally_averages_over_active_tokens_and_keeps_the_largest() -> None:
    active = torch.tensor([[True, True, False], [True, False, False]])
    x = float64([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]])
    found = tally(Terms(loss=torch.zeros(2, 3), means={"x": x}, maxima={"y": -x}), active)
    assert found.count.item() == 3.0
    assert found.summary() == {"x": 3.0, "y_max": -1.0}


def test_tallies_add() -> None:
    def one(x: float, **maxima: float) -> Tally:
        terms = Terms(
            loss=torch.zeros(1, 1),
            means={"x": torch.tensor([[x]])},
            maxima={name: torch.tensor([[value]]) for name, value in maxima.items()},
        )
        return tally(terms, TRUE)

    first, second = one(1.0, a=5.0, b=2.0), one(3.0, a=4.0, c=-1.0)
    for both in (first + second, second + first, Tally() + first + second):
        assert both.summary() == {"x": 2.0, "a_max": 5.0, "b_max": 2.0, "c_max": -1.0}
    assert first.summary() == {"x": 1.0, "a_max": 5.0, "b_max": 2.0}  # unchanged by adding


def test_a_report_that_only_one_part_has_counts_as_zero_in_the_other() -> None:
    loss = torch.zeros(1, 1)
    with_entropy = tally(Terms(loss=loss, means={"entropy": torch.ones(1, 1)}), TRUE)
    without = tally(Terms(loss=loss), TRUE)
    assert (with_entropy + without).summary() == {"entropy": 0.5}
    assert (without + with_entropy).summary() == {"entropy": 0.5}


def test_a_tally_of_nothing_says_nothing() -> None:
    assert Tally().summary() == {}
    terms = Terms(loss=torch.zeros(1, 1), means={"x": torch.ones(1, 1)})
    assert tally(terms, ~TRUE).summary() == {}
    assert (tally(terms, ~TRUE) + tally(terms, TRUE)).summary() == {"x": 1.0}


def test_a_part_without_an_active_token_has_no_largest_value() -> None:
    terms = Terms(loss=torch.zeros(1, 1), maxima={"x": torch.tensor([[9.0]])})
    low = Terms(loss=torch.zeros(1, 1), maxima={"x": torch.tensor([[-3.0]])})
    assert (tally(terms, ~TRUE) + tally(low, TRUE)).summary() == {"x_max": -3.0}


def test_sums_are_made_in_float64() -> None:
    ones = torch.ones(1, 4, dtype=torch.float32)
    ones[0, 0] = 2.0**24  # in float32, adding one to it changes nothing
    found = tally(Terms(loss=ones, means={"x": ones}), ones > 0)
    assert found.sums["x"].item() == 2.0**24 + 3
    assert found.count.dtype == torch.float64


def test_the_summary_of_ratios() -> None:
    batch = ready()
    logprobs = moved(batch)
    ratios = (logprobs - batch.need("old_logprobs")).exp()[batch.active].tolist()
    summary = tally(clipped(logprobs, batch), batch.active).summary()
    count = len(ratios)
    size = sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios))
    assert summary["effective_sample_size"] == pytest.approx(size, rel=1e-12)
    assert 0 < size < 0.95
    assert summary["ratio_variance"] == pytest.approx(statistics.pvariance(ratios), rel=1e-11)
    assert summary["ratio"] == pytest.approx(statistics.fmean(ratios), rel=1e-12)
    assert summary["ratio_max"] == pytest.approx(max(ratios), rel=1e-12)
    assert set(summary) == {
        *("ratio", "approx_kl", "clip_low", "clip_high", "ratio_max"),
        *("effective_sample_size", "ratio_variance"),
    }


def test_ratios_of_one_waste_no_sample_and_have_no_variance() -> None:
    batch = ready()
    summary = tally(clipped(batch.need("old_logprobs"), batch), batch.active).summary()
    assert summary["effective_sample_size"] == 1.0
    assert summary["ratio_variance"] == 0.0


def test_rounding_never_makes_a_negative_variance() -> None:
    means = {"ratio": float64([[0.1 + 0.2]]), "ratio_squared": float64([[0.09]])}
    summary = tally(Terms(loss=torch.zeros(1, 1), means=means), TRUE).summary()
    assert summary["ratio_variance"] == 0.0


def test_ratios_that_underflow_have_no_effective_sample() -> None:
    zero = float64([[0.0]])
    terms = Terms(loss=zero, means={"ratio": zero, "ratio_squared": zero})
    assert tally(terms, TRUE).summary()["effective_sample_size"] == 0.0


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_explained_variance_equals_the_loop_at_any_scale(offset: float, scale: float) -> None:
    batch = ready()
    returns = (batch.need("returns") + offset) * scale
    values = returns + 0.4 * scale * batch.need("values")
    batch = batch.replace(returns=returns)
    summary = tally(squared(values, batch), batch.active).summary()
    errors = (returns - values)[batch.active].tolist()
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(
        returns[batch.active].tolist()
    )
    assert 0.5 < expected < 0.95
    assert summary["explained_variance"] == pytest.approx(expected, rel=1e-9)
    assert set(summary) == {"value", "return", "value_error", "value_clip", "explained_variance"}


@pytest.mark.parametrize("target", [0.0, 0.7, 1e8 / 3])
def test_equal_returns_leave_no_variance_to_explain(target: float) -> None:
    batch = Batch.from_rewards([0.0] * 7)
    batch = batch.replace(returns=torch.full((7, 1), target, dtype=torch.float64))
    values = torch.arange(7.0, dtype=torch.float64)[:, None]
    summary = tally(squared(values, batch), batch.active).summary()
    assert summary["explained_variance"] == 0.0


def test_the_share_of_groups_that_teach_nothing() -> None:
    rewards = [1.0, 0.0, 0.7, 0.7, 0.7, 5.0, 2.0, 2.0]
    groups = [4, 4, 2, 2, 2, 9, 8, 8]
    batch = Batch.from_rewards(rewards, groups=groups)
    assert share_without_signal(batch) == 0.75
    broken = batch.replace(valid=torch.tensor([True, False, *[True] * 6]))
    assert share_without_signal(broken) == 1.0
    rounding = Batch.from_rewards([0.1 + 0.2, 0.3, 1.0, 2.0], groups=[0, 0, 1, 1])
    assert share_without_signal(rounding) == 0.5
    tokens = batch.replace(token_rewards=torch.arange(8.0)[:, None])
    assert share_without_signal(tokens) == 0.25
    assert share_without_signal(Batch.from_rewards([])) == 0.0


def test_a_tally_needs_the_shape_of_the_loss() -> None:
    with refuses(
        "active: expected shape [1, 1], got [1, 2]; every [B, T] tensor is indexed by the token "
        "it is about"
    ):
        tally(Terms(loss=torch.zeros(1, 1)), torch.ones(1, 2).bool())
