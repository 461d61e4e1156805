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
    leave_one_out_normalised,
    max_only,
    pass_at_k,
    sequence_returns,
)
from posttrain.types import Batch

LONELY = (
    "groups: group 4 has one member, and 2 at least are compared; sample 2 or more completions for "
    "each prompt (rl.group_size in a recipe), or choose an advantage that compares with no other "
    "completion: return, constant_baseline, moving_baseline, greedy_baseline, batch_whitened, "
    "return_to_go, turn_return_to_go, gae, towards_teacher"
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
def test_leave_one_out_normalised_equals_the_loop(seed: int) -> None:
    """In a group of two the one other has no deviation: that of both is taken."""

    def normalised(deviation: Callable[[list[float]], float], epsilon: float) -> Tensor:
        def formula(own: float, group: list[float]) -> float:
            others = list(group)
            others.remove(own)
            apart = own - statistics.fmean(others)
            return apart / (deviation(others if len(others) > 1 else group) + epsilon)

        return spread(batch, formula)

    for batch in with_and_without_token_rewards(seed):
        made = leave_one_out_normalised(batch)
        close(made.need("advantages"), normalised(statistics.stdev, 1e-6))
        made = leave_one_out_normalised(batch, deviation="population", epsilon=0.5)
        close(made.need("advantages"), normalised(statistics.pstdev, 0.5))
        made = leave_one_out_normalised(batch, epsilon=0.0)
        close(made.need("advantages"), normalised(statistics.stdev, 0.0))


def test_leave_one_out_normalised_by_hand() -> None:
    """Of 1, 3 and 7: others 3 and 7 have mean 5 and squares 4 + 4; 1 and 7: 4 and 9 + 9; 1 and 3: 2
    and 1 + 1. So −4/√8, −1/√18 and 5/√2 with n − 1 = 1, and with n = 2 each times √2.
    """
    batch = Batch.from_rewards([1.0, 3.0, 7.0])
    expected = torch.tensor(
        [[-4 / math.sqrt(8.0), -1 / math.sqrt(18.0), 5 / math.sqrt(2.0)]], dtype=torch.float64
    )
    close(leave_one_out_normalised(batch, epsilon=0.0).need("advantages").T, expected)
    population = leave_one_out_normalised(batch, epsilon=0.0, deviation="population")
    close(population.need("advantages").T, expected * math.sqrt(2.0))


def test_where_the_others_agree_the_whole_group_gives_the_scale() -> None:
    """1 among 0, 0, 0: all four have mean 1/4, squares 9/16 + 3/16 = 3/4 and deviation √(1/4), so
    1 is 1 / (1/2) away. Each 0 sees 0, 0 and 1: mean 1/3, squares 1/9 + 1/9 + 4/9 = 2/3, deviation
    √(1/3) with n − 1, so −(1/3)·√3.
    """
    batch = Batch.from_rewards([1.0, 0.0, 0.0, 0.0])
    third = -math.sqrt(3.0) / 3
    made = leave_one_out_normalised(batch, epsilon=0.0).need("advantages")
    close(made.T, [[2.0, third, third, third]])
    population = leave_one_out_normalised(batch, epsilon=0.0, deviation="population")
    assert population.need("advantages")[0].item() == pytest.approx(4 / math.sqrt(3.0))


def test_leave_one_out_normalised_keeps_the_type_of_the_log_probs() -> None:
    batch = ragged().replace(old_logprobs=torch.zeros(12, 10, dtype=torch.float32))
    assert leave_one_out_normalised(batch).need("advantages").dtype == torch.float32


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
    "leave_one_out_normalised": leave_one_out_normalised,
    "pass_at_k": lambda batch: pass_at_k(batch, k=1),
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


LONELY_REFUSED = ("group_centred", "group_normalised", "leave_one_out", "max_only")
LONELY_REFUSED += ("leave_one_out_normalised", "pass_at_k")


@pytest.mark.parametrize("name", LONELY_REFUSED)
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
    with refuses("epsilon: must be >= 0, got -0.001"):
        leave_one_out_normalised(batch, epsilon=-0.001)
    with refuses("deviation: unknown 'std'; choose one of sample, population"):
        leave_one_out_normalised(batch, deviation="std")
    with refuses("deviation: unknown 'std'; choose one of sample, population"):
        group_normalised(batch, deviation="std")
    with refuses("keeps: unknown 'both'; choose one of reward, centred"):
        max_only(batch, keeps="both")
