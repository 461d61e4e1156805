"""PPO's parts on random ragged batches, against loops over rows and tokens of plain Python.

The loops share nothing with the library. GAE is summed there in its other form, as the λ-weighted
mean of n-step returns (Schulman et al., 2016, eq. 16), which knows no δ. Whatever may not count,
prompt, padding, the gap between two turns, a row whose grader broke, holds NaN.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from algorithms.batches import close
from torch import Tensor

from posttrain.algorithms import kl, losses, weights
from posttrain.algorithms.advantages import gae
from posttrain.algorithms.shaping import kl_in_reward, score_at_last_token, whiten_rewards
from posttrain.types import Batch

SEEDS = range(5)
Table = list[list[float]]


@dataclass(kw_only=True)
class Case:
    """A batch as lists: ``spans[row]`` are the columns of the tokens that count, in order."""

    width: int
    mask: list[list[bool]] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)

    def batch(self, *names: str) -> Batch:
        """What the library is given: these tables, and no others."""
        mask, fields = torch.tensor(self.mask), {name: self.tensor(name) for name in names}
        scores = torch.tensor(self.scores, dtype=torch.float64)
        valid = torch.tensor(self.valid)
        return Batch(tokens=mask.long(), mask=mask, valid=valid, rewards=scores, **fields)

    def tensor(self, name: str) -> Tensor:
        return torch.tensor(self.tables[name], dtype=torch.float64)

    def loop(self, function: Callable[..., tuple[float, ...]], *names: str) -> list[Table]:
        """``function`` of these tables at each token that counts, 0 elsewhere: a table a result."""
        results: list[Table] = [[[0.0] * self.width for _ in self.spans] for _ in range(2)]
        for row, span in enumerate(self.spans):
            for column in span:
                made = function(*(self.tables[name][row][column] for name in names))
                for result, value in zip(results, made, strict=False):
                    result[row][column] = value
        return results


def case(seed: int) -> Case:
    """Rows of every length; the first has a gap in its middle, the second a broken grader."""
    generator = random.Random(seed)
    made = Case(width=generator.randint(9, 17))
    for row in range(generator.randint(5, 9)):
        start = generator.randint(1, 4)
        stop = made.width if row == 2 else generator.randint(start + 3, made.width)
        mask = [start <= column < stop for column in range(made.width)]
        if row == 0 or generator.random() < 0.4:  # a tool's answer, of one token or more
            gap = generator.randint(start + 1, stop - 2)
            for column in range(gap, generator.randint(gap + 1, stop - 1)):
                mask[column] = False
        if row > 2 and generator.random() < 0.2:
            mask = [False] * made.width  # an empty completion
        valid = row != 1 and (row == 0 or generator.random() > 0.1)
        made.mask.append(mask)
        made.valid.append(valid)
        made.spans.append([column for column in range(made.width) if mask[column] and valid])
        made.scores.append(generator.gauss(0.0, 2.0) if valid else math.nan)
    means = {"values": 0.0, "token_rewards": 0.0, "advantages": 0.0, "returns": 0.0}
    for name, mean in {**means, "old_logprobs": -1.0, "ref_logprobs": -1.0, "now": -1.0}.items():
        made.tables[name] = [[math.nan] * made.width for _ in made.spans]
        for row, span in enumerate(made.spans):
            for column in span:
                made.tables[name][row][column] = generator.gauss(mean, 0.6)
    return made


def targets(case: Case, *, gamma: float, lam: float, steps: int | None = None) -> Table:
    """λ-returns, ``(1 − λ) Σ_{n<N} λ^{n−1} G^n + λ^{N−1} G^N``: N the steps left, K at most.

    ``G^n = r_t + γ r_{t+1} + … + γ^n V_{t+n}``, and V is 0 after the last token.
    """
    result = [[0.0] * case.width for _ in case.spans]
    for row, span in enumerate(case.spans):
        rewards = [case.tables["token_rewards"][row][column] for column in span]
        values = [case.tables["values"][row][column] for column in span]
        for start, column in enumerate(span):
            horizon = len(span) - start if steps is None else min(steps, len(span) - start)
            for count in range(1, horizon + 1):
                guess = sum(gamma**k * rewards[start + k] for k in range(count))
                if start + count < len(span):
                    guess += gamma**count * values[start + count]
                share = 1.0 if count == horizon else 1 - lam
                result[row][column] += lam ** (count - 1) * share * guess
    return result


def standardised(case: Case, table: Table, *, centre: bool) -> Table:
    """Over the tokens that count: less their mean, if asked, over their population deviation."""
    counted = [table[row][column] for row, span in enumerate(case.spans) for column in span]
    mean = sum(counted) / len(counted)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in counted) / len(counted))
    result = [[0.0] * case.width for _ in case.spans]
    for row, span in enumerate(case.spans):
        for column in span:
            result[row][column] = (table[row][column] - (mean if centre else 0.0)) / deviation
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_the_batches_hold_what_they_are_for(seed: int) -> None:
    made = case(seed)
    first = made.spans[0]
    assert first[-1] - first[0] >= len(first)  # a gap
    assert any(made.mask[1])
    assert not made.valid[1]
    assert len({len(span) for span in made.spans if span}) > 1
    assert not any(mask[0] for mask in made.mask)


@pytest.mark.parametrize("steps", [None, 1, 2, 3, 5, 40])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.37, 0.99), (0.99, 0.2)])
def test_gae_is_the_weighted_mean_of_n_step_returns(
    gamma: float, lam: float, *, steps: int | None
) -> None:
    options = {"gamma": gamma, "lam": lam, "steps": steps}
    for seed in SEEDS:
        made = case(seed)
        batch = gae(made.batch("token_rewards", "values"), normalise=False, **options)
        made.tables["returns"] = targets(made, **options)
        close(batch.need("returns"), made.tables["returns"])
        expected, _ = made.loop(lambda target, value: (target - value,), "returns", "values")
        close(batch.need("advantages"), expected)


@pytest.mark.parametrize("gamma", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_limits_of_lambda_are_temporal_difference_and_monte_carlo(
    seed: int, gamma: float
) -> None:
    made = case(seed)
    difference, monte_carlo = ([[0.0] * made.width for _ in made.spans] for _ in range(2))
    for row, span in enumerate(made.spans):
        reward, value = made.tables["token_rewards"][row], made.tables["values"][row]
        next_value = to_go = 0.0  # nothing comes after the last token
        for column in reversed(span):
            to_go = reward[column] + gamma * to_go
            monte_carlo[row][column] = to_go - value[column]
            difference[row][column] = reward[column] + gamma * next_value - value[column]
            next_value = value[column]
    for lam, expected in ((0.0, difference), (1.0, monte_carlo)):
        batch = gae(made.batch("token_rewards", "values"), gamma=gamma, lam=lam, normalise=False)
        close(batch.need("advantages"), expected)


@pytest.mark.parametrize("shift_mean", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_rewards_equal_the_loop(seed: int, shift_mean: bool) -> None:
    made = case(seed)
    batch = whiten_rewards(made.batch("token_rewards"), shift_mean=shift_mean)
    expected = standardised(made, made.tables["token_rewards"], centre=shift_mean)
    close(batch.need("token_rewards"), expected)


PENALTIES: dict[tuple[kl.Estimator, kl.Direction], Callable[[float, float], float]] = {
    ("k1", "reverse"): lambda old, ref: old - ref,
    ("k2", "reverse"): lambda old, ref: (old - ref) ** 2 / 2,
    ("k3", "reverse"): lambda old, ref: math.exp(ref) / math.exp(old) - (ref - old) - 1,
    ("k1", "forward"): lambda old, ref: math.exp(ref) / math.exp(old) * (ref - old),
    ("k3", "forward"): lambda old, ref: math.exp(ref - old) * (ref - old - 1) + 1,
}


@pytest.mark.parametrize(("estimator", "direction"), PENALTIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_penalty_in_the_reward_equals_the_loop(
    seed: int, *, estimator: kl.Estimator, direction: kl.Direction
) -> None:
    made, penalty = case(seed), PENALTIES[estimator, direction]
    names = ("token_rewards", "old_logprobs", "ref_logprobs")
    batch = made.batch(*names)
    batch = kl_in_reward(batch, coefficient=0.3, estimator=estimator, direction=direction)
    expected, _ = made.loop(lambda reward, *logprobs: (reward - 0.3 * penalty(*logprobs),), *names)
    close(batch.need("token_rewards").masked_fill(~batch.active, 0.0), expected)


Token = tuple[float, float]  # the loss of a token, and its slope by V or by log π


def squared_token(value: float, target: float, old: float) -> Token:
    return (value - target) * (value - target) / 2, value - target


def clipped_value_token(value: float, target: float, old: float, *, clip: float) -> Token:
    held = old + clip if value > old + clip else old - clip if value < old - clip else value
    if abs(held - target) > abs(value - target):
        return (held - target) * (held - target) / 2, 0.0
    return squared_token(value, target, old)


def huber_token(value: float, target: float, old: float, *, delta: float) -> Token:
    distance = abs(value - target)
    if distance > delta:
        return delta * distance - delta * delta / 2, math.copysign(delta, value - target)
    return squared_token(value, target, old)


def clipped_token(
    now: float, old: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Token:
    ratio = math.exp(now) / math.exp(old)
    if advantage > 0 and ratio > 1 + clip_high:
        return -(1 + clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def penalised_token(now: float, old: float, advantage: float, *, coefficient: float) -> Token:
    ratio = math.exp(now) / math.exp(old)
    divergence, slope = ratio - 1 - math.log(ratio), ratio - 1
    return coefficient * divergence - ratio * advantage, coefficient * slope - ratio * advantage


CRITIC, POLICY = ("now", "returns", "values"), ("now", "old_logprobs", "advantages")
LOSSES = [
    (losses.squared, squared_token, CRITIC, {}),
    (losses.clipped_value, clipped_value_token, CRITIC, {"clip": 0.1}),
    (losses.clipped_value, clipped_value_token, CRITIC, {"clip": 0.8}),
    (losses.huber, huber_token, CRITIC, {"delta": 0.1}),
    (losses.huber, huber_token, CRITIC, {"delta": 0.8}),
    (losses.clipped, clipped_token, POLICY, {"clip_low": 0.1, "clip_high": 0.3}),
    (losses.clipped, clipped_token, POLICY, {"clip_low": 0.5, "clip_high": 0.1}),
    (losses.penalised, penalised_token, POLICY, {"coefficient": 0.7}),
]


@pytest.mark.parametrize(("loss", "token", "names", "options"), LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_their_gradients_equal_the_loop(
    seed: int, loss: Any, *, token: Any, names: tuple[str, ...], options: dict[str, float]
) -> None:
    made = case(seed)
    variable = made.tensor("now").requires_grad_()
    terms = loss(variable, made.batch(*names[1:]), **options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), variable)
    expected_loss, expected_gradient = made.loop(partial(token, **options), *names)
    close(terms.loss.detach(), expected_loss)
    close(gradient, expected_gradient)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_step_of_ppo_equals_the_loop(seed: int) -> None:
    """Score, penalty, whitening, advantage, both losses: their order and their mean over tokens."""
    made = case(seed)
    batch = score_at_last_token(made.batch("old_logprobs", "ref_logprobs", "values"))
    batch = whiten_rewards(kl_in_reward(batch, coefficient=0.1))
    batch = weights.token_mean(gae(batch, gamma=0.95, lam=0.9))
    now = made.tensor("now").requires_grad_()
    loss = losses.clipped(now, batch).loss + 0.5 * losses.squared(now, batch).loss
    (gradient,) = torch.autograd.grad(weights.total(loss, batch), now)

    penalty, _ = made.loop(lambda old, ref: (0.1 * (old - ref),), "old_logprobs", "ref_logprobs")
    rewards = [[-cost for cost in row] for row in penalty]
    for row, span in enumerate(made.spans):
        for column in span[-1:]:
            rewards[row][column] += made.scores[row]
    made.tables["token_rewards"] = standardised(made, rewards, centre=False)
    made.tables["returns"] = targets(made, gamma=0.95, lam=0.9)
    raw, _ = made.loop(lambda target, value: (target - value,), "returns", "values")
    made.tables["advantages"] = standardised(made, raw, centre=True)
    count = sum(map(len, made.spans))
    (_, policy), (_, critic) = made.loop(clipped_token, *POLICY), made.loop(squared_token, *CRITIC)
    pairs = zip(policy, critic, strict=True)
    close(gradient, [[(a + b / 2) / count for a, b in zip(*rows, strict=True)] for rows in pairs])
