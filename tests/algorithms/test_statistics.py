"""Masked and group statistics against plain loops, and where floats would betray them."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import GROUPS, close, members, ragged, refuses
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posttrain.algorithms import ops

SHAPE = "every [B, T] tensor is indexed by the token it is about"
INF = math.inf


def float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def masked_numbers(seed: int) -> tuple[Tensor, Tensor, list[float]]:
    """Values with garbage outside the mask, the mask, and the values that count."""
    batch = ragged(seed)
    values, mask = batch.need("values"), batch.mask
    counted = values[mask].tolist()
    return values.masked_fill(~mask, math.nan), mask, counted


@pytest.mark.parametrize("seed", range(3))
def test_masked_mean_and_centre_equal_the_loop(seed: int) -> None:
    values, mask, counted = masked_numbers(seed)
    mean = statistics.fmean(counted)
    close(ops.masked_mean(values, mask), mean)
    expected = torch.zeros_like(values).masked_scatter(mask, float64([x - mean for x in counted]))
    close(ops.masked_centre(values, mask), expected)


@pytest.mark.parametrize("seed", range(3))
def test_masked_mean_along_a_dimension_equals_the_loop(seed: int) -> None:
    """A row or column without an entry has mean 0."""
    values, mask, _ = masked_numbers(seed)

    def mean(row: Tensor, kept: Tensor) -> float:
        counted = row[kept].tolist()
        return statistics.fmean(counted) if counted else 0.0

    rows = [mean(values[row], mask[row]) for row in range(12)]
    columns = [mean(values[:, column], mask[:, column]) for column in range(10)]
    close(ops.masked_mean(values, mask, dim=1), rows)
    close(ops.masked_mean(values, mask, dim=-1), rows)
    close(ops.masked_mean(values, mask, dim=0), columns)
    assert not mask.any(dim=1).all()
    assert not mask.any(dim=0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_deviation_of_the_others_equals_the_loop(seed: int) -> None:
    batch = ragged(seed)
    values, groups, valid = batch.need("score_norms"), batch.need("groups"), batch.need("valid")
    kinds = {"sample": statistics.stdev, "population": statistics.pstdev}
    for kind, deviation in kinds.items():
        for marked in (None, valid):
            expected = []
            for row in range(12):
                others = [
                    float(values[other])
                    for other in range(12)
                    if other != row and GROUPS[other] == GROUPS[row]
                    if marked is None or marked[other]
                ]
                expected.append(deviation(others) if len(others) > 1 else 0.0)
            found = ops.others_deviation(values, groups, valid=marked, deviation=kind)
            close(found, expected)
    usual = ops.others_deviation(values, groups)
    close(usual, ops.others_deviation(values, groups, deviation="sample"), rtol=0, atol=0)


def test_the_deviation_of_the_others_far_from_zero() -> None:
    """At 1e8 a difference of squares would have lost every digit. Others: (1, 3), (0, 3), (0, 1);
    the spreads of two are |a − b| / √2."""
    values, groups = float64([0.0, 7.0, 1.0, 3.0, 7.0]) + 1e8, torch.tensor([5, 2, 5, 5, 2])
    found = ops.others_deviation(values, groups)
    close(found, [2 / 2**0.5, 0.0, 3 / 2**0.5, 1 / 2**0.5, 0.0])
    assert not ops.others_deviation(float64([0.1] * 7) + 1e8, torch.zeros(7, dtype=int)).any()


def test_the_deviation_of_the_others_compares_within_groups_alone() -> None:
    """300 groups of 4: the largest tensor on the way holds 300 · 4², not 1200²."""

    class Largest(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.seen = max(self.seen, tensor.numel())
            return result

    values, groups = torch.arange(1200).double(), torch.arange(1200) % 300
    with Largest() as largest:
        found = ops.others_deviation(values, groups)
    assert largest.seen == 300 * 4 * 4
    close(found[:1], [math.sqrt((300**2 + 0 + 300**2) / 2)])  # of 300, 600 and 900


def test_others_that_agree_have_no_deviation_at_all() -> None:
    """The group's squares less one's own would leave rounding: 1e-8, where it must be 0."""
    values = float64([1e3 + 0.1, 0.7, 0.7, 0.7, 0.1 + 0.2, 0.3, 5.0])
    groups = torch.tensor([4, 4, 4, 4, 9, 9, 9])
    found = ops.others_deviation(values, groups).tolist()
    assert found[0] == found[6] == 0.0
    assert all(spread > 0 for spread in found[1:6])
    with refuses(f"groups: expected shape [7], got [2]; {SHAPE}"):
        ops.others_deviation(values, torch.tensor([0, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_masked_variance_equals_the_loop(seed: int) -> None:
    values, mask, counted = masked_numbers(seed)
    close(ops.masked_variance(values, mask), statistics.pvariance(counted))
    population = ops.masked_variance(values, mask, deviation="population")
    close(population, statistics.pvariance(counted))
    sample = ops.masked_variance(values, mask, deviation="sample")
    close(sample, statistics.variance(counted))


@pytest.mark.parametrize("seed", range(3))
def test_whiten_equals_the_loop(seed: int) -> None:
    values, mask, counted = masked_numbers(seed)
    mean = statistics.fmean(counted)
    deviations = {"population": statistics.pstdev(counted), "sample": statistics.stdev(counted)}
    close(ops.whiten(values, mask)[mask], [(x - mean) / deviations["population"] for x in counted])
    for name, deviation in deviations.items():
        centred = ops.whiten(values, mask, deviation=name)
        close(centred[mask], [(x - mean) / deviation for x in counted])
        scaled = ops.whiten(values, mask, centre=False, deviation=name)
        close(scaled[mask], [x / deviation for x in counted])
        assert not centred[~mask].any()
        assert not scaled[~mask].any()


def test_masked_statistics_of_nothing_and_of_one() -> None:
    values, none = float64([math.nan, 4.0]), torch.tensor([False, False])
    one = torch.tensor([False, True])
    for mask, mean in ((none, 0.0), (one, 4.0)):
        close(ops.masked_mean(values, mask), mean, rtol=0)
        close(ops.masked_centre(values, mask), [0.0, 0.0], rtol=0)
        close(ops.masked_variance(values, mask), 0.0, rtol=0)
        close(ops.masked_variance(values, mask, deviation="sample"), 0.0, rtol=0)
        close(ops.whiten(values, mask), [0.0, 0.0], rtol=0)
    close(ops.whiten(values, one, centre=False), [0.0, 4.0], rtol=0)


@pytest.mark.parametrize("value", [0.7, 0.0, -1.1, 1e8 + 0.1, 1e-200])
def test_equal_values_have_no_deviation_at_all(value: float) -> None:
    values, mask = float64([value] * 7), torch.ones(7, dtype=torch.bool)
    zeros, groups = [0.0] * 7, torch.zeros(7, dtype=torch.long)
    close(ops.masked_centre(values, mask), zeros, rtol=0, atol=0)
    close(ops.masked_variance(values, mask), 0.0, rtol=0, atol=0)
    close(ops.whiten(values, mask), zeros, rtol=0, atol=0)
    close(ops.whiten(values, mask, centre=False), [value] * 7, rtol=0, atol=0)
    close(ops.group_centre(values, groups), zeros, rtol=0, atol=0)
    close(ops.group_deviation(values, groups), zeros, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1.0, 2.0**30, 2.0**-30])
def test_values_that_differ_by_rounding_are_equal_and_by_more_are_not(scale: float) -> None:
    both, groups = torch.tensor([True, True]), torch.tensor([0, 0])
    rounding, signal = scale * float64([0.1 + 0.2, 0.3]), scale * float64([1.0, 1.0 + 1e-12])
    close(ops.whiten(rounding, both), [0.0, 0.0], rtol=0, atol=0)
    close(ops.group_deviation(rounding, groups), [0.0, 0.0], rtol=0, atol=0)
    close(ops.whiten(signal, both), [-1.0, 1.0])
    spread = (signal[1] - signal[0]).item() / 2
    close(ops.group_deviation(signal, groups, deviation="population"), [spread, spread], atol=0)


def test_a_common_offset_costs_no_digits() -> None:
    values, mask = float64([1.0, 2.5, 4.0]), torch.ones(3, dtype=torch.bool)
    groups = torch.zeros(3, dtype=torch.long)
    close(ops.masked_centre(values + 1e8, mask), [-1.5, 0.0, 1.5], rtol=0, atol=0)
    close(ops.masked_variance(values + 1e8, mask), 1.5, rtol=0, atol=0)
    close(ops.group_centre(values + 1e8, groups), [-1.5, 0.0, 1.5], rtol=0, atol=0)
    close(ops.group_deviation(values + 1e8, groups), [1.5] * 3, rtol=0, atol=0)


def test_group_index_numbers_groups_in_order() -> None:
    index, size = ops.group_index(torch.tensor([40, -3, 40, 7]))
    assert (index.tolist(), size) == ([2, 0, 2, 1], 3)


def by_group(values: Tensor, valid: Tensor | None, what: Callable[[list[float]], float]) -> Tensor:
    """``what`` of the valid values of each sequence's group, by a loop."""
    result = torch.empty_like(values)
    for row, group in enumerate(GROUPS):
        result[row] = what(
            [
                float(values[other])
                for other, number in enumerate(GROUPS)
                if number == group and (valid is None or bool(valid[other]))
            ]
        )
    return result


def sample_deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("everyone", [True, False])
def test_group_statistics_equal_the_loop(seed: int, everyone: bool) -> None:
    batch = ragged(seed)
    values, groups = batch.need("values")[:, 1], batch.need("groups")
    valid = None if everyone else torch.tensor([row % 5 != 2 for row in range(12)])
    inside = torch.ones(12, dtype=torch.bool) if valid is None else valid
    spoilt = values.masked_fill(~inside, 1e9)
    close(ops.group_sum(values, groups), by_group(values, None, math.fsum))
    assert ops.group_count(groups, valid).tolist() == by_group(values, valid, len).tolist()
    close(ops.group_max(spoilt, groups, valid=valid), by_group(values, valid, max))
    centred = ops.keep(values - by_group(values, valid, statistics.fmean), inside)
    close(ops.group_centre(spoilt, groups, valid=valid), centred)
    close(
        ops.group_deviation(spoilt, groups, valid=valid), by_group(values, valid, sample_deviation)
    )
    population = ops.group_deviation(spoilt, groups, valid=valid, deviation="population")
    close(population, by_group(values, valid, statistics.pstdev))


def test_group_members_helper_covers_the_valid_rows_once() -> None:
    batch = ragged()
    rows = [row for group in members(batch) for row in group]
    assert sorted(rows) == batch.valid.nonzero().flatten().tolist()
    assert sorted(len(group) for group in members(batch)) == [2, 2, 3, 4]


def test_a_group_without_a_valid_member_is_all_zero() -> None:
    values, groups = float64([math.nan, INF, 3.0, -5.0]), torch.tensor([1, 1, 2, 2])
    valid = torch.tensor([False, False, True, True])
    close(ops.group_max(values, groups, valid=valid), [0.0, 0.0, 3.0, 3.0], rtol=0)
    close(ops.group_centre(values, groups, valid=valid), [0.0, 0.0, 4.0, -4.0], rtol=0)
    assert ops.group_count(groups, valid).tolist() == [0, 0, 2, 2]
    deviation = ops.group_deviation(values, groups, valid=valid, deviation="population")
    close(deviation, [0.0, 0.0, 4.0, 4.0], rtol=0)
    close(ops.group_deviation(values, groups, valid=valid), [0.0, 0.0, 32**0.5, 32**0.5])


def test_the_largest_of_a_group_may_be_negative() -> None:
    values, groups = float64([-3.0, -2.0, -7.0]), torch.tensor([0, 0, 1])
    close(ops.group_max(values, groups), [-2.0, -2.0, -7.0], rtol=0)


def test_a_group_of_one_has_no_deviation() -> None:
    values, groups = float64([3.0, 5.0, 9.0]), torch.tensor([0, 1, 1])
    close(ops.group_centre(values, groups), [0.0, -2.0, 2.0], rtol=0)
    close(ops.group_deviation(values, groups), [0.0, 8**0.5, 8**0.5])


@pytest.mark.parametrize("function", [ops.masked_mean, ops.masked_centre])
def test_masked_statistics_refuse_another_shape(function: Callable[..., Tensor]) -> None:
    with refuses(f"mask: expected shape [2], got [1]; {SHAPE}"):
        function(float64([1.0, 2.0]), torch.tensor([True]))


@pytest.mark.parametrize("function", [ops.group_sum, ops.group_max, ops.group_centre])
def test_group_statistics_refuse_another_shape(function: Callable[..., Tensor]) -> None:
    with refuses(f"groups: expected shape [2], got [3]; {SHAPE}"):
        function(float64([1.0, 2.0]), torch.tensor([0, 1, 1]))


KINDS = ("masked_variance", "whiten", "group_deviation", "others_deviation")


@pytest.mark.parametrize("statistic", KINDS)
def test_deviation_is_sample_or_population(statistic: str) -> None:
    grouped = statistic in ("group_deviation", "others_deviation")
    where = torch.tensor([0, 0]) if grouped else torch.tensor([True, True])
    with refuses("deviation: unknown 'smaple'; choose one of sample, population"):
        getattr(ops, statistic)(float64([1.0, 2.0]), where, deviation="smaple")
