"""Advantages that compare siblings, against plain loops over the members of each group."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import close, members, ragged, refuses
from torch import Tensor

from posttrain.algorithms.advantages import (
    batch_whitened,
    group_centred,
    group_normalised,
    leave_one_out,
    max_only,
    sequence_returns,
)
from posttrain.types import Batch

LONELY = (
    "groups: group 4 has one member, and one member cannot be compared with its siblings; sample "
    "at least two completions for each prompt, or choose an advantage that needs no group "
    "(return, moving_baseline, batch_whitened, gae)"
)


def spread(batch: Batch, formula: Callable[[float, list[float]], float]) -> Tensor:
    """[B, T]: a formula of a sequence's return and those of its group, at its active tokens."""
    returns = sequence_returns(batch).tolist()
    expected = torch.zeros(12, 10, dtype=torch.float64)
    for rows in members(batch):
        for row in rows:
            value = formula(returns[row], [returns[other] for other in rows])
            expected[row, batch.active[row]] = value
    return expected


def with_and_without_token_rewards(seed: int) -> list[Batch]:
    batch = ragged(seed)
    return [batch, batch.replace(token_rewards=None)]


@pytest.mark.parametrize("seed", range(3))
def test_group_centred_equals_the_loop(seed: int) -> None:
    for batch in with_and_without_token_rewards(seed):
        expected = spread(batch, lambda own, group: own - statistics.fmean(group))
        close(group_centred(batch).need("advantages"), expected)


@pytest.mark.parametrize("seed", range(3))
def test_group_normalised_equals_the_loop(seed: int) -> None:
    def normalised(deviation: Callable[[list[float]], float], epsilon: float) -> Tensor:
        def formula(own: float, group: list[float]) -> float:
            return (own - statistics.fmean(group)) / (deviation(group) + epsilon)

        return spread(batch, formula)

    for batch in with_and_without_token_rewards(seed):
        close(group_normalised(batch).need("advantages"), normalised(statistics.stdev, 1e-6))
        population = group_normalised(batch, deviation="population", epsilon=0.5)
        close(population.need("advantages"), normalised(statistics.pstdev, 0.5))
        bare = group_normalised(batch, deviation="sample", epsilon=0.0)
        close(bare.need("advantages"), normalised(statistics.stdev, 0.0))


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_equals_the_loop(seed: int) -> None:
    def formula(own: float, group: list[float]) -> float:
        others = list(group)
        others.remove(own)
        return own - statistics.fmean(others)

    for batch in with_and_without_token_rewards(seed):
        close(leave_one_out(batch).need("advantages"), spread(batch, formula))


@pytest.mark.parametrize("seed", range(3))
def test_max_only_equals_the_loop(seed: int) -> None:
    for batch in with_and_without_token_rewards(seed):
        kept = spread(batch, lambda own, group: own if own == max(group) else 0.0)
        close(max_only(batch).need("advantages"), kept)
        close(max_only(batch, keeps="reward").need("advantages"), kept)
        centred = spread(
            batch, lambda own, group: own - statistics.fmean(group) if own == max(group) else 0.0
        )
        close(max_only(batch, keeps="centred").need("advantages"), centred)


def test_ties_at_the_maximum_all_count() -> None:
    batch = Batch.from_rewards([2.0, 2.0, -1.0])
    close(max_only(batch).need("advantages").T, [[2.0, 2.0, 0.0]], rtol=0)
    centred = max_only(batch, keeps="centred")
    close(centred.need("advantages").T, [[1.0, 1.0, 0.0]], rtol=0)


EQUAL: dict[str, Callable[[Batch], Batch]] = {
    "group_centred": group_centred,
    "group_normalised": group_normalised,
    "population": lambda batch: group_normalised(batch, deviation="population"),
    "no epsilon": lambda batch: group_normalised(batch, epsilon=0.0),
    "leave_one_out": leave_one_out,
    "max_only": lambda batch: max_only(batch, keeps="centred"),
    "batch_whitened": batch_whitened,
    "centred, whitened": lambda batch: batch_whitened(batch, centre_groups=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EQUAL)
def test_seven_rewards_of_seven_tenths_teach_exactly_nothing(name: str, dtype: torch.dtype) -> None:
    batch = Batch.from_rewards([0.7] * 7)
    batch = batch.replace(rewards=batch.need("rewards").to(dtype))
    assert EQUAL[name](batch).need("advantages").tolist() == [[0.0]] * 7


@pytest.mark.parametrize("name", EQUAL)
def test_rewards_that_differ_by_rounding_teach_next_to_nothing(name: str) -> None:
    batch = Batch.from_rewards([0.1 + 0.2, 0.3, 0.3])
    assert EQUAL[name](batch).need("advantages").abs().max() < 1e-16
    broken = batch.replace(valid=torch.tensor([True, True, False]))
    assert EQUAL[name](broken).need("advantages").abs().max() < 1e-16


@pytest.mark.parametrize("name", EQUAL)
def test_a_group_whose_graders_all_broke_gets_nothing(name: str) -> None:
    batch = Batch.from_rewards([math.nan, math.inf, 1.0, 3.0], groups=[0, 0, 1, 1])
    batch = batch.replace(valid=torch.tensor([False, False, True, True]))
    advantages = EQUAL[name](batch).need("advantages")[:, 0].tolist()
    assert advantages[:2] == [0.0, 0.0]
    assert advantages[3] > 0
    assert advantages[2] == (0.0 if name == "max_only" else -advantages[3])


@pytest.mark.parametrize("name", EQUAL)
def test_the_last_valid_member_of_a_group_has_nobody_to_be_compared_with(name: str) -> None:
    batch = Batch.from_rewards([math.nan, 5.0], groups=[0, 0])
    batch = batch.replace(valid=torch.tensor([False, True]))
    assert EQUAL[name](batch).need("advantages").tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("name", ["group_centred", "group_normalised", "leave_one_out", "max_only"])
def test_a_group_of_one_is_refused(name: str) -> None:
    batch = Batch.from_rewards([1.0, 2.0, 3.0, 4.0], groups=[3, 3, 4, 5])
    with refuses(LONELY):
        EQUAL[name](batch)
    with refuses(LONELY):
        batch_whitened(batch, centre_groups=True)


def test_options_of_the_group_advantages_are_checked() -> None:
    batch = Batch.from_rewards([1.0, 2.0])
    with refuses("epsilon: must be >= 0, got -0.001"):
        group_normalised(batch, epsilon=-0.001)
    with refuses("deviation: unknown 'std'; choose one of sample, population"):
        group_normalised(batch, deviation="std")
    with refuses("keeps: unknown 'both'; choose one of reward, centred"):
        max_only(batch, keeps="both")
