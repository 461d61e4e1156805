"""The source documents' numbers on baselines and variance, each computed by the library.

=====================================================================  ===========================
document                                                               test
=====================================================================  ===========================
lecture 17: rewards 11, 9, 0, 2 have "variance 5.32" (a deviation)     two_state_variances
lecture 17: with b = 10 and b = 1, "variance 1.15" (a deviation)       two_state_variances
lecture 17: b(s) = E[R|s]; R − b is the advantage Q − V                state_mean_is_the_baseline
lecture 17: b* = E[‖∇ log π‖² R] / E[‖∇ log π‖²] minimises variance    optimal_baseline
guide: "lower variance, free lunch" for any baseline (wrong)           baseline_of_09_adds_noise
lecture 17, guide: the group mean as a baseline b(s) (nearly right)    group_mean_shrinks
=====================================================================  ===========================
"""

import itertools
import math

import pytest
import torch
from enumeration import (
    close,
    every_action,
    every_gradient,
    every_logprob,
    expected_gradient,
    gradient_variance,
    numbers,
    printed,
    softmax_policy,
)

from posttrain.algorithms import advantages, losses, ops
from posttrain.types import Batch

THREE_TOKENS = [0.5, 0.3, 0.2]
REWARDS = [1.0, 0.0, 2.0]
TRUE_GRADIENT = [0.05, -0.27, 0.22]  # 1 · 0.5 · [0.5, −0.3, −0.2] + 2 · 0.2 · [−0.5, −0.3, 0.8]
SCORE_NORMS = [0.38, 0.78, 0.98]  # 0.5² + 0.3² + 0.2², 0.5² + 0.7² + 0.2², 0.5² + 0.3² + 0.8²


def test_two_state_variances_are_standard_deviations() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    rewards = numbers(11, 9, 0, 2)
    baselined = advantages.group_centred(
        Batch.from_rewards([11, 9, 0, 2], groups=[1, 1, 2, 2])
    ).advantages[:, 0]
    close(baselined, [1, -1, -1, 1])

    before = ops.masked_variance(rewards, everything, deviation="sample")
    after = ops.masked_variance(baselined, everything, deviation="sample")
    close(before, 85 / 3)  # 5.5² + 3.5² + 5.5² + 3.5² = 85
    close(after, 4 / 3)
    close(ops.group_deviation(rewards, torch.zeros(4).long()), [math.sqrt(85 / 3)] * 4)
    close(ops.group_deviation(baselined, torch.zeros(4).long()), [math.sqrt(4 / 3)] * 4)
    assert printed(before.sqrt(), 2) == ["5.32"]
    assert printed(after.sqrt(), 2) == ["1.15"]
    assert printed(before, 2) == ["28.33"]
    assert printed(after, 2) == ["1.33"]

    close(ops.masked_variance(rewards, everything), 85 / 4)  # the population's
    close(ops.masked_variance(baselined, everything), 1.0)


def test_state_mean_is_the_baseline_of_the_example() -> None:
    """b(S1) = 10 and b(S2) = 1 are the means, so R − b is the advantage Q − V."""
    batch = Batch.from_rewards([11, 9, 0, 2], groups=[1, 1, 2, 2])
    first = advantages.constant_baseline(batch.select(numbers(0, 1).long()), baseline=10.0)
    second = advantages.constant_baseline(batch.select(numbers(2, 3).long()), baseline=1.0)
    by_hand = torch.cat([first.advantages, second.advantages])
    close(by_hand, [[1.0], [-1.0], [-1.0], [1.0]])
    close(advantages.group_centred(batch).advantages, by_hand)


def _optimal(tenths: list[int], rewards: list[float], *, norms: list[float]) -> float:
    """b* of a group of ten that holds each action as often as the policy picks it."""
    actions = torch.arange(len(rewards)).repeat_interleave(torch.tensor(tenths))
    batch = Batch.from_rewards(numbers(*rewards)[actions]).replace(
        score_norms=numbers(*norms)[actions]
    )
    advantage = advantages.optimal_baseline(batch).advantages[:, 0]
    baseline = batch.rewards - advantage
    close(baseline, [float(baseline[0])] * len(actions))
    return float(baseline[0])


def test_optimal_baseline_has_the_least_variance() -> None:
    logits, batch = softmax_policy(THREE_TOKENS), every_action(THREE_TOKENS, REWARDS)
    logprobs = every_logprob(logits)
    scores = every_gradient(losses.nll(logprobs, batch).loss, logits)
    norms = scores.square().sum(dim=1)
    close(norms, SCORE_NORMS)
    best = _optimal([5, 3, 2], REWARDS, norms=norms.tolist())
    close(best, 0.582 / 0.62)  # (0.19 · 1 + 0.196 · 2) / (0.19 + 0.234 + 0.196)

    def variance(baseline: float) -> float:
        baselined = advantages.constant_baseline(batch, baseline=baseline)
        loss = losses.naive(logprobs, baselined).loss
        close(expected_gradient(loss, logits, batch=baselined), TRUE_GRADIENT)
        return gradient_variance(loss, logits, batch=baselined)

    close(variance(0.0), 0.974 - 0.1238)  # E[‖∇ log π‖² R²] − ‖E g‖²
    close(variance(0.9), 0.3048)  # the mean reward
    close(variance(best), 0.974 - 0.582**2 / 0.62 - 0.1238)
    for step in range(-40, 41):
        offset = step / 20  # a parabola: nothing but b* is as quiet
        close(variance(best + offset) - variance(best), 0.62 * offset**2)


def test_optimal_baseline_is_one_number_for_each_state() -> None:
    batch = Batch.from_rewards([11, 9, 0, 2], groups=[1, 1, 2, 2]).replace(
        score_norms=numbers(3, 1, 1, 4)
    )
    found = batch.rewards - advantages.optimal_baseline(batch).advantages[:, 0]
    close(found, [10.5, 10.5, 1.6, 1.6])  # (3·11 + 9) / 4 and (0 + 4·2) / 5


def test_baseline_of_09_adds_noise_where_two_tokens_compete() -> None:
    """A policy that is right 90 % of the time: the mean is 64 times as noisy as no baseline."""
    probabilities, rewards = [0.9, 0.1], [1.0, 0.0]
    logits, batch = softmax_policy(probabilities), every_action(probabilities, rewards)
    logprobs = every_logprob(logits)
    scores = every_gradient(losses.nll(logprobs, batch).loss, logits)
    norms = scores.square().sum(dim=1)
    close(norms, [0.02, 1.62])
    best = _optimal([9, 1], rewards, norms=norms.tolist())
    close(best, 0.1)  # 0.9 · 0.02 / (0.9 · 0.02 + 0.1 · 1.62): the rare mistake weighs most

    variances = []
    for baseline in (0.0, 0.9, best):
        baselined = advantages.constant_baseline(batch, baseline=baseline)
        loss = losses.naive(logprobs, baselined).loss
        close(expected_gradient(loss, logits, batch=baselined), [0.09, -0.09])
        variances.append(gradient_variance(loss, logits, batch=baselined))
    close(variances, [0.0018, 0.1152, 0.0])
    close(variances[1] / variances[0], 64.0)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_group_mean_shrinks_the_gradient_and_leave_one_out_does_not(group_size: int) -> None:
    """The group's mean holds the action's own reward: every group of G, enumerated."""
    logits = softmax_policy(THREE_TOKENS)
    groups = torch.tensor(list(itertools.product(range(3), repeat=group_size)))
    chance = numbers(*THREE_TOKENS)[groups].prod(dim=1)  # of each group
    actions = groups.flatten()
    rows = torch.arange(len(groups)).repeat_interleave(group_size)
    batch = Batch.from_rewards(numbers(*REWARDS)[actions], groups=rows.tolist()).replace(
        weights=(chance[rows] / group_size)[:, None]
    )
    logprobs = every_logprob(logits)[actions]
    for advantage, share in [
        (advantages.group_centred, 1 - 1 / group_size),
        (advantages.leave_one_out, 1.0),
    ]:
        loss = losses.naive(logprobs, advantage(batch)).loss
        push = expected_gradient(loss, logits, batch=batch)
        close(push, share * numbers(*TRUE_GRADIENT))
