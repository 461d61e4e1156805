"""Advantages that subtract a number: plain, constant, moving and optimal baselines."""

import math

import pytest
import torch
from algorithms.batches import BROKEN, EMPTY, close, members, ragged, refuses

from posttrain.algorithms.advantages import (
    constant_baseline,
    greedy_baseline,
    moving_baseline,
    optimal_baseline,
    plain_return,
    sequence_returns,
    update_baseline,
)
from posttrain.algorithms.advantages.baselines import per_token
from posttrain.types import Batch


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_return_is_the_sum_of_token_rewards_over_active_tokens() -> None:
    batch = ragged()
    rewards = batch.need("token_rewards")
    expected = [
        math.fsum(rewards[row, column] for column in range(10) if batch.active[row, column])
        for row in range(12)
    ]
    close(sequence_returns(batch), expected)
    assert expected[EMPTY] == expected[BROKEN] == 0.0


def test_the_return_is_the_reward_where_tokens_have_none() -> None:
    batch = ragged().replace(token_rewards=None)
    expected = batch.need("rewards").clone()
    expected[BROKEN] = 0.0
    close(sequence_returns(batch), expected, rtol=0)
    whole = Batch.from_rewards([1.5, -2.0])
    close(sequence_returns(whole), [1.5, -2.0], rtol=0)


def test_every_active_token_gets_the_advantage_of_its_sequence() -> None:
    batch = ragged()
    advantages = torch.arange(12, dtype=torch.float64) - 5.5
    expected = [
        [float(advantages[row]) if batch.active[row, column] else 0.0 for column in range(10)]
        for row in range(12)
    ]
    close(per_token(batch, advantages).need("advantages"), expected, rtol=0)


def test_advantages_take_the_floating_type_of_the_log_probs() -> None:
    batch = ragged().replace(old_logprobs=torch.zeros(12, 10, dtype=torch.float32))
    for made in (plain_return(batch), constant_baseline(batch, baseline=0.1)):
        assert made.need("advantages").dtype == torch.float32


def test_the_three_numbers_that_can_be_subtracted() -> None:
    batch = Batch.from_rewards([1.0, 0.0, -2.0]).replace(baseline=float64(0.25))
    close(plain_return(batch).need("advantages").T, [[1.0, 0.0, -2.0]], rtol=0)
    constant = constant_baseline(batch, baseline=0.5)
    close(constant.need("advantages").T, [[0.5, -0.5, -2.5]], rtol=0)
    close(moving_baseline(batch).need("advantages").T, [[0.75, -0.25, -2.25]], rtol=0)


def test_baselines_see_the_return_of_the_tokens() -> None:
    batch = ragged()
    returns = sequence_returns(batch)[:, None]
    plain = plain_return(batch).need("advantages")
    close(plain, returns.expand(12, 10) * batch.active)
    moving = moving_baseline(batch).need("advantages")
    close(moving, (returns - 0.3).expand(12, 10) * batch.active)
    constant = constant_baseline(batch, baseline=-2.0).need("advantages")
    close(constant, (returns + 2.0).expand(12, 10) * batch.active)


def test_the_greedy_completion_of_each_prompt_is_its_baseline() -> None:
    """1 − 0.75, 0 − 0.75 and −2 − (−2.5): a number for each; the running mean is another thing."""
    batch = Batch.from_rewards([1.0, 0.0, -2.0]).replace(
        greedy_rewards=float64([0.75, 0.75, -2.5]), baseline=float64(9.0)
    )
    close(greedy_baseline(batch).need("advantages").T, [[0.25, -0.75, 0.5]], rtol=0)


def test_the_greedy_baseline_sees_the_return_of_the_tokens() -> None:
    batch = ragged()
    apart = sequence_returns(batch) - batch.need("greedy_rewards")
    made = greedy_baseline(batch).need("advantages")
    close(made, apart[:, None].expand(12, 10) * batch.active)


def test_a_greedy_completion_that_could_not_be_scored_gives_no_advantage() -> None:
    """NaN is a baseline that is missing: 0 in its place would pay R, as if greedy had failed."""
    batch = Batch.from_rewards([1.0, 3.0, 2.0]).replace(
        greedy_rewards=float64([math.nan, 0.5, math.nan])
    )
    assert greedy_baseline(batch).need("advantages").tolist() == [[0.0], [2.5], [0.0]]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_greedy_reward_is_refused_where_it_counts(value: float) -> None:
    batch = Batch.from_rewards([1.0, 3.0]).replace(greedy_rewards=float64([0.0, value]))
    with refuses(
        f"greedy_rewards: {value} at [1] (1 in all); mark what could not be scored in `valid` "
        "instead of passing NaN or infinity on"
    ):
        greedy_baseline(batch)
    broken = batch.replace(valid=torch.tensor([True, False]))
    assert greedy_baseline(broken).need("advantages").tolist() == [[1.0], [0.0]]


def test_the_running_mean_moves_by_one_minus_decay() -> None:
    batch = Batch.from_rewards([1.0, 3.0, math.nan])
    batch = batch.replace(valid=torch.tensor([True, True, False]))
    assert update_baseline(None, batch) == 2.0
    assert math.isclose(update_baseline(1.0, batch), 0.9 * 1.0 + 0.1 * 2.0)
    assert update_baseline(1.0, batch, decay=0.25) == 0.25 * 1.0 + 0.75 * 2.0
    assert update_baseline(1.0, batch, decay=0.0) == 2.0
    assert update_baseline(1.0, batch, decay=1.0) == 1.0
    assert update_baseline(8.0, Batch.from_rewards([1.0, 3.0]), decay=0.5) == 5.0


def test_a_batch_without_a_valid_reward_leaves_the_running_mean() -> None:
    batch = Batch.from_rewards([math.nan, math.inf])
    batch = batch.replace(valid=torch.tensor([False, False]))
    assert update_baseline(0.4, batch) == 0.4
    assert update_baseline(None, batch) == 0.0


def test_the_optimal_baseline_by_hand() -> None:
    # b* = (3 · 1 + 1 · 0) / 4 = 0.75 in group 0, (2 · 5 + 6 · 1) / 8 = 2 in group 1.
    batch = Batch.from_rewards([1.0, 5.0, 0.0, 1.0], groups=[0, 1, 0, 1])
    batch = batch.replace(score_norms=float64([3.0, 2.0, 1.0, 6.0]))
    advantages = optimal_baseline(batch).need("advantages")
    close(advantages.T, [[0.25, 3.0, -0.75, -1.0]])


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_baseline_equals_the_loop(seed: int) -> None:
    batch = ragged(seed).replace(token_rewards=None)
    rewards, norms = batch.need("rewards"), batch.need("score_norms")
    expected = torch.zeros(12, 10, dtype=torch.float64)
    for rows in members(batch):
        weight = math.fsum(norms[row] for row in rows)
        baseline = math.fsum(norms[row] * rewards[row] for row in rows) / weight
        for row in rows:
            expected[row, batch.active[row]] = rewards[row] - baseline
    close(optimal_baseline(batch).need("advantages"), expected)


def test_the_optimal_baseline_has_the_least_variance() -> None:
    rewards, norms = float64([1.0, -2.0, 0.5, 4.0]), float64([0.3, 2.0, 1.0, 0.7])
    batch = Batch.from_rewards(rewards).replace(score_norms=norms)
    best = float(rewards[0] - optimal_baseline(batch).need("advantages")[0, 0])

    def noise(baseline: float) -> float:
        return float((norms * (rewards - baseline).square()).sum())

    assert noise(best) < min(noise(best + 1e-3), noise(best - 1e-3))


def test_without_a_gradient_the_optimal_baseline_is_the_mean() -> None:
    batch = Batch.from_rewards([1.0, 3.0, 8.0, 1.0, 2.0], groups=[0, 0, 0, 1, 1])
    batch = batch.replace(
        score_norms=float64([0.0, 0.0, 5.0, 1.0, 3.0]),
        valid=torch.tensor([True, True, False, True, True]),
    )
    advantages = optimal_baseline(batch).need("advantages")
    close(advantages.T, [[-1.0, 1.0, 0.0, -0.75, 0.25]])


def test_the_optimal_baseline_without_a_valid_mark_counts_everyone() -> None:
    batch = Batch.from_rewards([2.0, 4.0]).replace(score_norms=float64([0.0, 0.0]))
    close(optimal_baseline(batch).need("advantages").T, [[-1.0, 1.0]], rtol=0)


def test_norms_may_have_another_floating_type_than_rewards() -> None:
    norms = torch.tensor([0.1, 0.7, 0.3])
    batch = Batch.from_rewards([1.0, 0.2, 0.0])
    found = optimal_baseline(batch.replace(score_norms=norms)).need("advantages")
    wanted = optimal_baseline(batch.replace(score_norms=norms.double())).need("advantages")
    close(found, wanted)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_broken_sequence_may_carry_a_norm_that_makes_no_sense(norm: float) -> None:
    batch = Batch.from_rewards([1.0, 3.0, 9.0])
    batch = batch.replace(
        valid=torch.tensor([True, True, False]), score_norms=float64([1.0, 1.0, norm])
    )
    close(optimal_baseline(batch).need("advantages").T, [[-1.0, 1.0, 0.0]], rtol=0)


@pytest.mark.parametrize("norm", [-1.0, -1e-300])
def test_negative_norms_are_refused(norm: float) -> None:
    batch = Batch.from_rewards([1.0, 3.0]).replace(score_norms=float64([norm, 0.0]))
    with refuses("score_norms: must be squared norms, so at least 0"):
        optimal_baseline(batch)
