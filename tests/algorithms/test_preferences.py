"""Statistics of a reward model, by hand, by plain loops, and on pairs whose truth is known."""

import math
import statistics

import pytest
import torch
from algorithms.batches import refuses
from torch import Tensor

from posttrain.algorithms.preferences import (
    Bin,
    accuracy,
    calibration,
    calibration_error,
    length_correlation,
    pair_calibration,
)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(size: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


def near(expected: float, *, rel: float = 1e-12) -> object:
    return pytest.approx(expected, rel=rel, abs=1e-14)


def test_a_tie_is_half_a_win() -> None:
    chosen, rejected = float64(2.0, 0.0, 1.0, 5.0, -1.0), float64(1.0, 3.0, 1.0, 5.0, -2.0)
    assert accuracy(chosen, rejected) == near(3 / 5)  # two wins, one loss, two ties
    assert accuracy(rejected, chosen) == near(2 / 5)
    assert accuracy(chosen, chosen) == 0.5


def test_the_smallest_margin_decides_a_pair() -> None:
    one = torch.ones(4)
    above = torch.nextafter(one, 2 * one)
    assert (accuracy(above, one), accuracy(one, above)) == (1.0, 0.0)


def test_a_table_by_hand() -> None:
    """0.05, 0.15, 0.19 | 0.2 | 0.85, 1 in bins a fifth wide: an edge begins its bin, 1 ends one."""
    probabilities = float64(0.85, 0.05, 1.0, 0.15, 0.2, 0.19)
    observed = float64(1.0, 0.0, 0.0, 1.0, 0.5, 0.0)
    first, second, third = calibration(probabilities, observed, bins=5)
    assert (first.low, first.high, first.count) == (0.0, 0.2, 3)
    assert (first.predicted, first.observed) == (near(0.13), near(1 / 3))
    assert second == Bin(low=0.2, high=0.4, predicted=0.2, observed=0.5, count=1)
    assert (third.low, third.high, third.count) == (0.8, 1.0, 2)
    assert (third.predicted, third.observed) == (near(0.925), near(0.5))


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 100])
def test_every_edge_begins_its_own_bin(bins: int) -> None:
    edges = float64(*(number / bins for number in range(bins)))
    table = calibration(edges, torch.zeros(bins), bins=bins)
    assert [row.low for row in table] == edges.tolist()
    assert [row.high for row in table] == [*edges[1:].tolist(), 1.0]
    assert [row.predicted for row in table] == edges.tolist()
    assert {row.count for row in table} == {1}


def test_ten_bins_unless_told_and_empty_ones_left_out() -> None:
    table = calibration(float64(0.31, 0.39, 0.99), float64(1.0, 0.0, 1.0))
    assert [(row.low, row.high, row.count) for row in table] == [(0.3, 0.4, 2), (0.9, 1.0, 1)]


@pytest.mark.parametrize("bins", [4, 10])
def test_pairs_are_shown_both_ways(bins: int) -> None:
    """Against a loop that shows each pair twice and sorts the showings into bins."""
    chosen, rejected = normal(200, seed=1) + 0.5, normal(200, seed=2)
    showings: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for better, worse in zip(chosen.tolist(), rejected.tolist(), strict=True):
        rate = 1 / (1 + math.exp(worse - better))
        for said, happened in ((rate, 1.0), (1 - rate, 0.0)):
            showings[math.floor(said * bins)].append((said, happened))
    table = pair_calibration(chosen, rejected, bins=bins)
    assert [row.count for row in table] == [len(pairs) for pairs in showings if pairs]
    for row, pairs in zip(table, filter(None, showings), strict=True):
        assert row.predicted == near(statistics.fmean(said for said, _ in pairs))
        assert row.observed == near(statistics.fmean(happened for _, happened in pairs))
    assert sum(row.count for row in table) == 400


def test_the_two_halves_of_the_table_mirror_each_other() -> None:
    table = pair_calibration(normal(500, seed=3) + 1, normal(500, seed=4))
    assert len(table) == 10
    for row, mirror in zip(table, reversed(table), strict=True):
        assert (row.low, row.count) == (near(1 - mirror.high), mirror.count)
        assert row.predicted == near(1 - mirror.predicted)
        assert row.observed == near(1 - mirror.observed)


def test_three_to_one_that_happens_three_times_in_four_is_calibrated() -> None:
    odds = logit(0.75)
    table = pair_calibration(float64(odds, odds, odds, -odds), torch.zeros(4))
    assert [(row.count, row.observed) for row in table] == [(4, 0.25), (4, 0.75)]
    assert calibration_error(table) == near(0.0)


def test_flipped_labels_hold_the_observed_rate_down() -> None:
    """A model that knows the answer says 99 %, and one label in ten is wrong: 9 points off."""
    margin = torch.full((1000,), logit(0.99), dtype=torch.float64)
    margin[::10] *= -1
    low, high = pair_calibration(margin, torch.zeros_like(margin))
    assert (low.observed, high.observed) == (near(0.1), near(0.9))
    assert calibration_error([low, high]) == near(0.09, rel=1e-9)


def test_the_calibration_error_is_weighted_by_count() -> None:
    table = [
        Bin(low=0.0, high=0.5, predicted=0.3, observed=0.1, count=1),
        Bin(low=0.5, high=1.0, predicted=0.6, observed=0.9, count=4),
    ]
    assert calibration_error(table) == near((0.2 + 4 * 0.3) / 5)


def test_pairs_do_not_see_a_common_offset_of_the_scores() -> None:
    chosen, rejected = normal(50, seed=5).mul(8).round() / 8, normal(50, seed=6).mul(8).round() / 8
    assert pair_calibration(chosen + 1024, rejected + 1024) == pair_calibration(chosen, rejected)
    assert accuracy(chosen + 1024, rejected + 1024) == accuracy(chosen, rejected)


def test_a_margin_past_all_doubt_is_still_a_rate() -> None:
    low, high = pair_calibration(float64(1e6), float64(-1e6))
    assert (low.predicted, low.observed, high.predicted, high.observed) == (0.0, 0.0, 1.0, 1.0)


def test_correlation_with_length_by_hand() -> None:
    """Deviations (−1, 0, 1, 2, −2) and (−3, 1, 0, 4, −2): products 15, squares 10 and 30."""
    scores, lengths = float64(1.0, 2.0, 3.0, 4.0, 0.0), torch.tensor([2, 6, 5, 9, 3])
    assert length_correlation(scores, lengths) == near(15 / math.sqrt(300))
    assert length_correlation(-scores, lengths) == near(-15 / math.sqrt(300))


def test_many_ties_equal_the_loop() -> None:
    scores, lengths = (3 * normal(60, seed=7)).round(), (2 * normal(60, seed=8)).round()
    plain = statistics.correlation(scores.tolist(), lengths.tolist())
    assert length_correlation(scores, lengths) == near(plain)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_scale_and_offset_change_no_correlation(scale: float) -> None:
    scores, lengths = normal(40, seed=9), normal(40, seed=10) + 200
    moved = 4 + scale * scores
    assert length_correlation(moved, lengths) == near(length_correlation(scores, lengths), rel=1e-6)


def test_a_rising_curve_is_no_line() -> None:
    lengths = torch.arange(1, 30)
    scores = (lengths / 2.0).exp()
    assert 0.2 < length_correlation(scores, lengths) < 0.8


def test_a_line_never_correlates_beyond_one() -> None:
    for seed in range(50):
        scores = normal(3, seed=seed)
        assert 1 - 1e-12 < length_correlation(scores, 3 * scores + 1) <= 1.0
        assert -1.0 <= length_correlation(scores, 1 - 3 * scores) < 1e-12 - 1


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
def test_no_spread_is_no_correlation(value: float) -> None:
    constant, rising = torch.full((7,), value), torch.arange(7)
    assert length_correlation(constant, rising) == 0.0
    assert length_correlation(rising, constant) == 0.0
    assert length_correlation(float64(value), float64(3.0)) == 0.0


def test_no_statistic_carries_a_gradient_or_loses_digits() -> None:
    scores = torch.tensor([1.0, 1.0 + 2**-20, 0.0], requires_grad=True)
    assert accuracy(scores, torch.ones(3)) == 0.5
    (row,) = calibration(torch.full((3,), 0.1), torch.ones(3))
    assert row.predicted == torch.tensor(0.1).item()  # float32's tenth, averaged in float64
    assert length_correlation(scores, torch.tensor([5, 6, 1])) > 0.9


PAIRS = "entry i of both is about the same example"


def test_columns_that_do_not_match_are_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with refuses(
        f"chosen, rejected: expected two tensors of one shape [N], got [2] and [3]; {PAIRS}"
    ):
        accuracy(two, three)
    with refuses(
        f"chosen, rejected: expected two tensors of one shape [N], got [2, 1] and [2, 1]; {PAIRS}"
    ):
        pair_calibration(two[:, None], two[:, None])
    with refuses(
        f"probabilities, observed: expected two tensors of one shape [N], got [3] and [2]; {PAIRS}"
    ):
        calibration(three, two)
    with refuses(
        f"scores, lengths: expected two tensors of one shape [N], got [2] and [3]; {PAIRS}"
    ):
        length_correlation(two, three)


def test_nothing_at_all_is_refused() -> None:
    none = torch.zeros(0)
    for statistic in (accuracy, pair_calibration):
        with refuses("chosen: no examples; hold out at least one"):
            statistic(none, none)
    with refuses("table: holds no predictions; make it with calibration, from some pairs"):
        calibration_error([])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused(value: float) -> None:
    fault = (
        f"{value} at [1] (1 in all); mark what could not be scored in `valid` instead of passing "
        "NaN or infinity on"
    )
    with refuses(f"chosen: {fault}"):
        accuracy(float64(0.0, value), float64(0.0, 0.0))
    with refuses(f"lengths: {fault}"):
        length_correlation(float64(0.0, 0.0), float64(0.0, value))


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_what_is_no_rate_is_refused(value: float) -> None:
    advice = "turn a difference of scores into a rate with torch.sigmoid"
    with refuses(f"probabilities: must lie between 0 and 1, got {value}; {advice}"):
        calibration(float64(0.5, value), float64(0.0, 1.0))
    with refuses(f"observed: must lie between 0 and 1, got {value}; {advice}"):
        calibration(float64(0.0, 1.0), float64(0.5, value))
    with refuses("bins: must be >= 1, got 0"):
        calibration(float64(0.5), float64(0.5), bins=0)
