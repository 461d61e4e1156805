"""Shaping: where the score lands, what divergence and length cost, by hand and by loops."""

import math

import pytest
import torch
from algorithms.batches import BROKEN, EMPTY, chosen, close, ragged, refuses

from posttrain.algorithms import kl
from posttrain.algorithms.advantages import sequence_returns
from posttrain.algorithms.shaping import (
    kl_in_reward,
    last,
    missing_end,
    overlong,
    score_at_last_token,
)
from posttrain.types import Batch

ALREADY = (
    "token_rewards: already made from the score, so changing the score now would do nothing; "
    "shape the score first"
)


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_last_active_token_is_found_across_gaps() -> None:
    batch = ragged()
    expected = [[column in chosen(batch, row)[-1:] for column in range(10)] for row in range(12)]
    assert last(batch).tolist() == expected
    assert last(batch).sum() == 10  # none in the empty and the broken sequence


def test_the_score_lands_on_the_last_active_token() -> None:
    batch = ragged().replace(token_rewards=None, turn_rewards=None)
    made = score_at_last_token(batch).need("token_rewards")
    expected = torch.zeros(12, 10, dtype=torch.float64)
    for row in range(12):
        for column in chosen(batch, row)[-1:]:
            expected[row, column] = batch.need("rewards")[row]
    close(made, expected, rtol=0)
    assert not made[[EMPTY, BROKEN]].any()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_refused(reward: float) -> None:
    with refuses(
        f"rewards: {reward} at [1] (1 in all); mark what could not be scored in `valid` instead "
        "of passing NaN or infinity on"
    ):
        score_at_last_token(Batch.from_rewards([1.0, reward]))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_divergence_is_taken_from_every_token(
    estimator: kl.Estimator, direction: kl.Direction
) -> None:
    batch = ragged()
    made = kl_in_reward(batch, coefficient=0.3, estimator=estimator, direction=direction)
    each = kl.estimate(
        batch.need("old_logprobs"),
        batch.need("ref_logprobs"),
        estimator=estimator,
        direction=direction,
    )
    expected = batch.need("token_rewards") - 0.3 * each * batch.active
    close(made.need("token_rewards"), expected)


def test_by_default_the_sum_of_the_penalty_is_the_log_ratio_of_the_sequence() -> None:
    batch = ragged().replace(token_rewards=None)
    returns = sequence_returns(kl_in_reward(batch, coefficient=2.0))
    steps = batch.need("old_logprobs") - batch.need("ref_logprobs")
    for row in range(12):
        columns = chosen(batch, row)
        penalty = 2.0 * math.fsum(float(steps[row, column]) for column in columns)
        reward = float(batch.need("rewards")[row]) if columns else 0.0
        assert returns[row].item() == pytest.approx(reward - penalty, rel=1e-12)


def test_the_penalty_carries_no_gradient() -> None:
    batch = ragged()
    batch = batch.replace(
        old_logprobs=batch.need("old_logprobs").requires_grad_(),
        ref_logprobs=batch.need("ref_logprobs").requires_grad_(),
    )
    assert not kl_in_reward(batch, coefficient=1.0).need("token_rewards").requires_grad


def test_garbage_outside_the_active_tokens_costs_nothing() -> None:
    batch = ragged()
    spoilt = batch.need("ref_logprobs").masked_fill(~batch.active, math.nan)
    made = kl_in_reward(batch.replace(ref_logprobs=spoilt), coefficient=0.5)
    expected = kl_in_reward(batch, coefficient=0.5)
    close(made.need("token_rewards"), expected.need("token_rewards"), rtol=0)


def lengths_of(*lengths: int) -> Batch:
    mask = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    return Batch(
        tokens=mask.long(), mask=mask, rewards=torch.ones(len(lengths), dtype=torch.float64)
    )


def test_overlong_is_free_then_linear_then_full() -> None:
    batch = lengths_of(0, 5, 6, 7, 9, 10, 12)  # free up to 10 − 4 = 6, full from 10
    made = overlong(batch, limit=10, buffer=4).need("rewards")
    close(made, [1.0, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0], rtol=0)
    tenth = overlong(batch, limit=10, buffer=4, factor=0.1).need("rewards")
    close(tenth, [1.0, 1.0, 1.0, 0.975, 0.925, 0.9, 0.9])
    at_once = overlong(batch, limit=10, buffer=1).need("rewards")
    close(at_once, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], rtol=0)
    whole = overlong(batch, limit=4, buffer=4, factor=1.0).need("rewards")
    close(whole, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], rtol=0)


def test_overlong_counts_only_the_policys_own_tokens() -> None:
    mask = torch.tensor([[False, True, False, True, True]])
    batch = Batch(tokens=mask.long(), mask=mask, rewards=float64([1.0]))
    close(overlong(batch, limit=4, buffer=2).need("rewards"), [0.5], rtol=0)


def test_a_missing_end_costs_the_penalty() -> None:
    batch = Batch.from_rewards([1.0, 2.0]).replace(truncated=torch.tensor([True, False]))
    close(missing_end(batch).need("rewards"), [0.0, 2.0], rtol=0)
    close(missing_end(batch, penalty=0.1).need("rewards"), [0.9, 2.0])


def test_bad_shaping_is_refused() -> None:
    batch = lengths_of(3).replace(truncated=torch.tensor([True]))
    with refuses("coefficient: must be >= 0, got -0.1"):
        kl_in_reward(ragged(), coefficient=-0.1)
    with refuses("buffer: must be >= 1, got 0"):
        overlong(batch, limit=10, buffer=0)
    with refuses("limit: must be >= 5, got 4"):
        overlong(batch, limit=4, buffer=5)
    with refuses("factor: must be >= 0, got -1.0"):
        overlong(batch, limit=10, buffer=4, factor=-1.0)
    with refuses("penalty: must be >= 0, got -1.0"):
        missing_end(batch, penalty=-1.0)


def test_shaping_a_score_that_was_already_given_out_is_refused() -> None:
    batch = lengths_of(3).replace(truncated=torch.tensor([True]))
    made = score_at_last_token(batch)
    with refuses(ALREADY):
        overlong(made, limit=10, buffer=4)
    with refuses(ALREADY):
        missing_end(made)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ref_logprobs", "Learner.infer with a reference model"),
        ("old_logprobs", "Learner.infer, before the first optimiser step"),
    ],
)
def test_a_penalty_needs_both_policies(name: str, source: str) -> None:
    with refuses(f"{name}: this batch has none; it is added by {source}"):
        kl_in_reward(ragged().replace(**{name: None}), coefficient=0.1)


def test_shaping_needs_scores_and_ends() -> None:
    batch = lengths_of(3)
    bare = batch.replace(rewards=None)
    missing = "rewards: this batch has none; it is added by collate (from the scores)"
    with refuses(missing):
        score_at_last_token(bare)
    with refuses(missing):
        overlong(bare, limit=10, buffer=4)
    with refuses(missing):
        missing_end(bare)
    with refuses("truncated: this batch has none; it is added by the caller"):
        missing_end(batch)


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs"])
def test_a_divergence_that_is_no_number_is_named(name: str) -> None:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    batch = Batch.from_rewards([1.0]).replace(old_logprobs=zero, ref_logprobs=zero)
    batch = score_at_last_token(batch).replace(**{name: zero - math.inf})
    with pytest.raises(ValueError, match=rf"^{name}: -inf at \[0, 0\] \(1 in all\)"):
        kl_in_reward(batch, coefficient=0.1)
