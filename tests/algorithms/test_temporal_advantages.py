"""Return-to-go, GAE and batch whitening, token by token against plain loops."""

import math
import statistics

import pytest
import torch
from algorithms.batches import BROKEN, EMPTY, chosen, close, members, ragged, refuses
from torch import Tensor

from posttrain.algorithms.advantages import batch_whitened, gae, return_to_go, sequence_returns
from posttrain.types import Batch


def returns_to_go(batch: Batch, gamma: float) -> Tensor:
    """Discounted sums over the policy's own tokens, backwards, by a loop."""
    rewards = batch.need("token_rewards")
    result = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        ahead = 0.0
        for column in reversed(chosen(batch, row)):
            ahead = float(rewards[row, column]) + gamma * ahead
            result[row, column] = ahead
    return result


def advantages_of_gae(batch: Batch, gamma: float, lam: float, steps: int | None) -> Tensor:
    """``Σ_{l < K} (γλ)^l δ_{t+l}`` over the policy's own tokens, by loops."""
    rewards, values = batch.need("token_rewards"), batch.need("values")
    result = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        columns = chosen(batch, row)
        value = [float(values[row, column]) for column in columns] + [0.0]
        delta = [
            float(rewards[row, column]) + gamma * value[place + 1] - value[place]
            for place, column in enumerate(columns)
        ]
        for place, column in enumerate(columns):
            window = delta[place:] if steps is None else delta[place : place + steps]
            result[row, column] = sum((gamma * lam) ** k * d for k, d in enumerate(window))
    return result


def whitened(values: Tensor, active: Tensor) -> Tensor:
    counted = values[active].tolist()
    mean, deviation = statistics.fmean(counted), statistics.pstdev(counted)
    return ((values - mean) / deviation).masked_fill(~active, 0.0)


@pytest.mark.parametrize("gamma", [0.0, 0.6, 1.0])
def test_return_to_go_equals_the_loop(gamma: float) -> None:
    batch = ragged()
    close(return_to_go(batch, gamma=gamma).need("advantages"), returns_to_go(batch, gamma))


def test_return_to_go_does_not_discount_unless_told() -> None:
    batch = ragged(1)
    close(return_to_go(batch).need("advantages"), returns_to_go(batch, 1.0))


@pytest.mark.parametrize("steps", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_gae_equals_the_loop(gamma: float, lam: float, steps: int | None) -> None:
    batch = ragged()
    made = gae(batch, gamma=gamma, lam=lam, steps=steps, normalise=False)
    expected = advantages_of_gae(batch, gamma, lam, steps)
    close(made.need("advantages"), expected)
    close(made.need("returns"), (expected + batch.need("values")) * batch.active)


def test_gae_by_default_whitens_and_uses_the_published_numbers() -> None:
    batch = ragged(2)
    raw = advantages_of_gae(batch, 1.0, 0.95, None)
    made = gae(batch)
    close(made.need("advantages"), whitened(raw, batch.active))
    close(made.need("returns"), (raw + batch.need("values")) * batch.active)


def test_gae_without_lambda_is_the_temporal_difference() -> None:
    batch = ragged()
    one_step = gae(batch, gamma=0.8, lam=1.0, steps=1, normalise=False)
    limit = gae(batch, gamma=0.8, lam=0.0, normalise=False)
    close(limit.need("advantages"), one_step.need("advantages"))


def test_gae_with_lambda_one_is_the_monte_carlo_return_minus_the_value() -> None:
    batch = ragged()
    made = gae(batch, gamma=0.8, lam=1.0, normalise=False)
    to_go = returns_to_go(batch, 0.8)
    close(made.need("returns"), to_go)
    close(made.need("advantages"), to_go - batch.need("values") * batch.active)


def test_truncation_beyond_the_longest_completion_changes_nothing() -> None:
    batch = ragged()
    whole = gae(batch, gamma=0.9, lam=0.8, normalise=False).need("advantages")
    longest = int(batch.active.sum(1).max())
    exact = gae(batch, gamma=0.9, lam=0.8, steps=longest, normalise=False)
    close(exact.need("advantages"), whole)
    short = gae(batch, gamma=0.9, lam=0.8, steps=longest - 1, normalise=False)
    assert not torch.allclose(short.need("advantages"), whole)


def test_a_critic_that_knows_the_return_leaves_nothing_to_learn() -> None:
    batch = ragged()
    batch = batch.replace(values=returns_to_go(batch, 1.0))
    made = gae(batch, lam=0.3, normalise=False)
    close(made.need("advantages"), torch.zeros(12, 10))


def test_gae_learns_nothing_from_garbage_values_of_others() -> None:
    batch = ragged()
    values = batch.need("values").requires_grad_()
    made = gae(batch.replace(values=values))
    assert not made.need("advantages").requires_grad
    assert not made.need("returns").requires_grad
    assert not made.need("advantages")[[EMPTY, BROKEN]].any()


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_batch_whitened_equals_the_loop(gamma: float) -> None:
    batch = ragged()
    made = batch_whitened(batch, gamma=gamma)
    close(made.need("advantages"), whitened(returns_to_go(batch, gamma), batch.active))


def test_batch_whitened_does_not_discount_unless_told() -> None:
    batch = ragged()
    made = batch_whitened(batch)
    close(made.need("advantages"), whitened(returns_to_go(batch, 1.0), batch.active))


def test_batch_whitened_spreads_a_sequence_reward_over_its_tokens() -> None:
    batch = ragged().replace(token_rewards=None)
    rewards = sequence_returns(batch)[:, None].expand(12, 10)
    made = batch_whitened(batch)
    close(made.need("advantages"), whitened(rewards, batch.active))


@pytest.mark.parametrize("with_token_rewards", [True, False])
def test_batch_whitened_can_centre_the_groups_first(with_token_rewards: bool) -> None:
    batch = ragged()
    batch = batch if with_token_rewards else batch.replace(token_rewards=None)
    returns = sequence_returns(batch)
    centred = torch.zeros(12, dtype=torch.float64)
    for rows in members(batch):
        mean = statistics.fmean(float(returns[row]) for row in rows)
        for row in rows:
            centred[row] = returns[row] - mean
    made = batch_whitened(batch, centre_groups=True)
    expected = whitened(centred[:, None].expand(12, 10), batch.active)
    close(made.need("advantages"), expected)


@pytest.mark.parametrize("with_groups", [False, True])
def test_the_deviation_of_a_batch_can_be_that_of_a_sample(with_groups: bool) -> None:
    """n tokens: the squares are divided by n − 1, so the advantages shrink by √((n − 1) / n)."""
    batch = ragged()
    count = int(batch.active.sum())
    shrunk = math.sqrt((count - 1) / count)
    usual = batch_whitened(batch, centre_groups=with_groups).need("advantages")
    sample = batch_whitened(batch, centre_groups=with_groups, deviation="sample")
    close(sample.need("advantages"), usual * shrunk)
    made = gae(batch, deviation="sample")
    close(made.need("advantages"), gae(batch).need("advantages") * shrunk)
    close(made.need("returns"), gae(batch).need("returns"), rtol=0, atol=0)
    for function in (batch_whitened, gae):
        with refuses("deviation: unknown 'std'; choose one of sample, population"):
            function(batch, deviation="std")


def test_rewards_whitened_by_a_sample_deviation_by_hand() -> None:
    """3 and 1: mean 2, squares 1 + 1 over n − 1 = 1."""
    made = batch_whitened(Batch.from_rewards([3.0, 1.0]), deviation="sample")
    close(made.need("advantages").T, [[1 / math.sqrt(2.0), -1 / math.sqrt(2.0)]])


@pytest.mark.parametrize("name", ["return_to_go", "gae", "batch_whitened"])
def test_temporal_advantages_take_the_floating_type_of_the_log_probs(name: str) -> None:
    function = {"return_to_go": return_to_go, "gae": gae, "batch_whitened": batch_whitened}[name]
    batch = ragged().replace(old_logprobs=torch.zeros(12, 10, dtype=torch.float32))
    made = function(batch)
    assert made.need("advantages").dtype == torch.float32
    assert made.returns is None or made.returns.dtype == torch.float32


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_discounts_lie_between_zero_and_one(name: str, value: float) -> None:
    with refuses(f"{name}: must be >= 0 and <= 1, got {value}"):
        gae(ragged(), **{name: value})
    if name == "gamma":
        with refuses(f"gamma: must be >= 0 and <= 1, got {value}"):
            return_to_go(ragged(), gamma=value)
        with refuses(f"gamma: must be >= 0 and <= 1, got {value}"):
            batch_whitened(ragged(), gamma=value)


@pytest.mark.parametrize("steps", [0, -3])
def test_gae_looks_at_least_one_step_ahead(steps: int) -> None:
    with refuses(f"steps: must be >= 1, got {steps}"):
        gae(ragged(), steps=steps)


GAMMA = (
    "gamma: discounts token rewards, and there are none here; set gamma=1, or make them with "
    "shaping.score_at_last_token and leave centre_groups out"
)


def test_a_discount_that_would_do_nothing_is_refused() -> None:
    with refuses(GAMMA):
        batch_whitened(ragged().replace(token_rewards=None), gamma=0.5)
    with refuses(GAMMA):
        batch_whitened(ragged(), gamma=0.5, centre_groups=True)
