"""Whitened rewards by hand: what is divided, by what, and what must not count."""

import math

import pytest
import torch
from algorithms.batches import close, ragged, refuses, spoiled, widened
from torch import Tensor

from posttrain.algorithms.advantages import gae
from posttrain.algorithms.shaping import whiten_rewards
from posttrain.types import Batch

# Active rewards are 1, 3, 5 and 7: mean 4, squares of the deviations 9 + 1 + 1 + 9, std √5.
MASK = [[False, True, True, False], [False, True, False, True], [False, True, True, True]]
REWARDS = [[9.0, 1.0, 3.0, 50.0], [-4.0, 5.0, 8.0, 7.0], [2.0, 100.0, -100.0, 30.0]]
VALID = [True, True, False]  # the last row's grader broke


def batch(rewards: object = REWARDS, *, valid: object = VALID) -> Batch:
    mask = torch.tensor(MASK)
    return Batch(
        tokens=mask.long(),
        mask=mask,
        valid=torch.tensor(valid),
        token_rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def whitened(made: Batch, *, shift_mean: bool = False) -> Tensor:
    return whiten_rewards(made, shift_mean=shift_mean).need("token_rewards")


def test_rewards_are_divided_by_the_population_deviation_of_the_active_tokens() -> None:
    expected = torch.tensor(
        [[0.0, 1.0, 3.0, 0.0], [0.0, 5.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    close(whitened(batch()), expected / math.sqrt(5.0))


def test_the_deviation_can_be_that_of_a_sample() -> None:
    """Squares of 20 over n − 1 = 3 tokens."""
    divided = whiten_rewards(batch(), deviation="sample").need("token_rewards")
    close(divided * math.sqrt(20 / 3), whitened(batch()) * math.sqrt(5.0))
    centred = whiten_rewards(batch(), shift_mean=True, deviation="sample").need("token_rewards")
    close(centred * math.sqrt(20 / 3), whitened(batch(), shift_mean=True) * math.sqrt(5.0))
    with refuses("deviation: unknown 'std'; choose one of sample, population"):
        whiten_rewards(batch(), deviation="std")


def test_the_mean_goes_only_where_that_is_asked_for() -> None:
    expected = torch.tensor(
        [[0.0, -3.0, -1.0, 0.0], [0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    close(whitened(batch(), shift_mean=True), expected / math.sqrt(5.0))


def test_a_row_that_is_valid_again_counts() -> None:
    """Of 1, 3, 5, 7, 100, −100 and 30 the mean is 46/7 and the mean square 20984/7."""
    rewards, mask = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(MASK)
    deviation = math.sqrt(20984 / 7 - (46 / 7) ** 2)
    close(whitened(batch(valid=[True, True, True])), rewards * mask / deviation)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("shift_mean", [False, True])
def test_what_is_not_active_changes_nothing(garbage: float, shift_mean: bool) -> None:
    plain = whitened(ragged(), shift_mean=shift_mean)
    close(whitened(spoiled(ragged(), garbage), shift_mean=shift_mean), plain, rtol=0, atol=0)
    padded = whitened(widened(ragged(), left=2, right=3), shift_mean=shift_mean)
    close(padded[:, 2:12], plain)
    assert not padded[:, [0, 1, 12, 13, 14]].any()


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e9])
@pytest.mark.parametrize("shift_mean", [False, True])
def test_the_scale_of_the_rewards_goes_even_where_it_is_minute(
    scale: float, shift_mean: bool
) -> None:
    rewards = [[scale * reward for reward in row] for row in REWARDS]
    made = whitened(batch(rewards), shift_mean=shift_mean)
    close(made, whitened(batch(), shift_mean=shift_mean), rtol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e-300, 1e8])
def test_rewards_without_spread_keep_their_scale(reward: float) -> None:
    equal = batch([[reward] * 4] * 3)
    close(whitened(equal), equal.need("token_rewards") * equal.active, rtol=0, atol=0)
    close(whitened(equal, shift_mean=True), torch.zeros(3, 4), rtol=0, atol=0)


def test_one_active_token_has_no_spread() -> None:
    one = batch(valid=[False, False, False])
    assert not whitened(one).any()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0, 2] = True
    close(whitened(batch().replace(mask=mask)), torch.tensor(REWARDS) * mask, rtol=0, atol=0)


def test_normalised_advantages_see_the_ratio_of_reward_and_value_alone() -> None:
    """With a critic that says nothing, the scale of the rewards was never visible."""
    silent = ragged().replace(values=torch.zeros(12, 10, dtype=torch.float64))
    before, after = gae(silent, lam=0.7), gae(whiten_rewards(silent), lam=0.7)
    close(after.need("advantages"), before.need("advantages"))
    spread = silent.need("token_rewards")[silent.active].std(correction=0)
    close(after.need("returns") * spread, before.need("returns"))


def test_nothing_but_the_rewards_changes_and_their_type_stays() -> None:
    before = batch().replace(token_rewards=torch.tensor(REWARDS, dtype=torch.float32))
    after = whiten_rewards(before)
    assert after.need("token_rewards").dtype == torch.float32
    assert after.replace(token_rewards=None).mask is before.mask
    assert before.need("token_rewards").tolist() == REWARDS


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    rewards = [row.copy() for row in REWARDS]
    rewards[1][3] = reward
    with refuses(
        f"token_rewards: {reward} at [1, 3] (1 in all); mark what could not be scored in `valid` "
        "instead of passing NaN or infinity on"
    ):
        whiten_rewards(batch(rewards))


def test_whitening_needs_rewards_of_tokens() -> None:
    with refuses(
        "token_rewards: this batch has none; it is added by "
        "posttrain.algorithms.shaping.score_at_last_token"
    ):
        whiten_rewards(batch().replace(token_rewards=None))
