"""What may not change a number: padding, garbage, order, offset and scale of the rewards."""

import math
from functools import partial

import pytest
import torch
from algorithms.batches import (
    BROKEN,
    close,
    moved,
    ragged,
    ready,
    spoiled,
    wide,
    widened,
)
from algorithms.recipes import ADVANTAGE_VARIANTS, OUTCOMES, WEIGHT_VARIANTS, outcome, prepared
from torch import Tensor

from posttrain.algorithms import corrections, shaping
from posttrain.algorithms.advantages import (
    batch_whitened,
    group_normalised,
    leave_one_out_normalised,
)
from posttrain.algorithms.diagnostics import share_without_signal
from posttrain.types import Batch

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
ORDER = torch.tensor([5, 11, 0, 7, 2, 9, 1, 4, 10, 3, 8, 6])


def same_outcome(
    found: tuple[Tensor, Tensor, dict[str, float]], wanted: tuple[Tensor, Tensor, dict[str, float]]
) -> None:
    close(found[0], wanted[0])
    close(found[1], wanted[1])
    assert list(found[2]) == list(wanted[2])
    for name, value in wanted[2].items():
        assert found[2][name] == pytest.approx(value, rel=1e-12, abs=1e-14)


def starting_point(name: str) -> tuple[Batch, Tensor]:
    batch = prepared(ready())
    return batch, batch.need("values") + 1.0 if name.startswith("value") else moved(batch)


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_where_nothing_counts_changes_no_loss(name: str, garbage: float) -> None:
    batch, outputs = starting_point(name)
    dirty = prepared(spoiled(ready(), garbage))
    found = outcome(name, outputs.masked_fill(~batch.active, garbage), dirty)
    same_outcome(found, outcome(name, outputs, batch))


@pytest.mark.parametrize("name", OUTCOMES)
def test_padding_changes_no_loss(name: str) -> None:
    batch, outputs = starting_point(name)
    padded = prepared(widened(ready(), left=2, right=3))
    loss, gradient, metrics = outcome(name, wide(outputs, 2, 3), padded)
    assert not gradient[:, :2].any()
    assert not gradient[:, -3:].any()
    same_outcome((loss, gradient[:, 2:-3], metrics), outcome(name, outputs, batch))


@pytest.mark.parametrize("name", OUTCOMES)
def test_order_changes_no_loss(name: str) -> None:
    batch, outputs = starting_point(name)
    loss, gradient, metrics = outcome(name, outputs, batch)
    shuffled = outcome(name, outputs[ORDER], prepared(ready().select(ORDER)))
    same_outcome(shuffled, (loss, gradient[ORDER], metrics))


@pytest.mark.parametrize("name", ADVANTAGE_VARIANTS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_where_nothing_counts_changes_no_advantage(name: str, garbage: float) -> None:
    advantage, batch = ADVANTAGE_VARIANTS[name], ragged()
    dirty = spoiled(batch, abs(garbage))
    assert dirty.rewards is not None
    assert not math.isfinite(dirty.rewards[BROKEN]) or garbage == 1e30
    close(advantage(dirty).need("advantages"), advantage(batch).need("advantages"))


@pytest.mark.parametrize("name", ADVANTAGE_VARIANTS)
def test_padding_changes_no_advantage(name: str) -> None:
    advantage = ADVANTAGE_VARIANTS[name]
    found = advantage(widened(ragged(), left=1, right=6)).need("advantages")
    assert not found[:, :1].any()
    assert not found[:, -6:].any()
    close(found[:, 1:-6], advantage(ragged()).need("advantages"))


@pytest.mark.parametrize("name", ADVANTAGE_VARIANTS)
def test_order_changes_no_advantage(name: str) -> None:
    advantage = ADVANTAGE_VARIANTS[name]
    found = advantage(ragged().select(ORDER)).need("advantages")
    close(found, advantage(ragged()).need("advantages")[ORDER])


@pytest.mark.parametrize("name", WEIGHT_VARIANTS)
def test_padding_and_order_change_no_weight(name: str) -> None:
    weigh = WEIGHT_VARIANTS[name]
    wanted = weigh(ragged()).need("weights")
    close(weigh(ragged().select(ORDER)).need("weights"), wanted[ORDER])
    found = weigh(widened(ragged(), left=1, right=2)).need("weights")
    close(found, torch.nn.functional.pad(wanted, (1, 2)))


@pytest.mark.parametrize("name", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_padding_and_garbage_change_no_correction(name: str, level: str) -> None:
    correct = corrections.CORRECTIONS[name]
    wanted = correct(ragged(), level=level).need("correction")
    close(correct(spoiled(ragged(), math.nan), level=level).need("correction"), wanted)
    found = correct(widened(ragged(), left=1, right=2), level=level).need("correction")
    close(found, torch.nn.functional.pad(wanted, (1, 2)))


def test_padding_changes_no_shaping() -> None:
    def shaped(batch: Batch) -> Tensor:
        batch = shaping.missing_end(shaping.overlong(batch, limit=8, buffer=5))
        return shaping.kl_in_reward(batch, coefficient=0.2).need("token_rewards")

    batch = ragged().replace(token_rewards=None)
    wanted = shaped(batch)
    close(shaped(widened(batch, left=1, right=2)), torch.nn.functional.pad(wanted, (1, 2)))
    dirty = batch.replace(
        old_logprobs=batch.need("old_logprobs").masked_fill(~batch.active, math.nan)
    )
    close(shaped(dirty), wanted)


def scored(batch: Batch, rewards: Tensor) -> Batch:
    """The batch with other rewards a sequence, all of which binary fractions hold exactly."""
    return batch.replace(rewards=rewards, token_rewards=None)


REWARDS = torch.tensor([0.25 * (row * 7 % 11) for row in range(12)], dtype=torch.float64)
NO_OFFSET = (
    *("group_centred", "group_normalised", "population", "leave_one_out", "optimal_baseline"),
    *("max centred", "batch_whitened", "centred, whitened", "pass_at_k", "whitened, sample"),
    *("leave_one_out_normalised", "others, population"),
)
NO_SCALE = {  # ε is in units of the reward, so it is left out
    "sample": partial(group_normalised, epsilon=0.0),
    "population": partial(group_normalised, epsilon=0.0, deviation="population"),
    "others": partial(leave_one_out_normalised, epsilon=0.0),
    "batch_whitened": batch_whitened,
    "whitened, sample": partial(batch_whitened, deviation="sample"),
    "centred, whitened": partial(batch_whitened, centre_groups=True),
}


@pytest.mark.parametrize("name", NO_OFFSET)
@pytest.mark.parametrize("offset", [1.0, -1000.0, 1e8])
def test_a_common_offset_of_the_rewards_changes_no_advantage(name: str, offset: float) -> None:
    advantage, batch = ADVANTAGE_VARIANTS[name], ragged()
    found = advantage(scored(batch, REWARDS + offset)).need("advantages")
    close(found, advantage(scored(batch, REWARDS)).need("advantages"), rtol=1e-12)


EACH_GROUP = ("group_centred", "group_normalised", "leave_one_out", "leave_one_out_normalised")


@pytest.mark.parametrize("name", EACH_GROUP)
def test_an_offset_of_each_group_changes_no_advantage(name: str) -> None:
    advantage, batch = ADVANTAGE_VARIANTS[name], ragged()
    offset = batch.need("groups").double() * 16.0
    found = advantage(scored(batch, REWARDS + offset)).need("advantages")
    close(found, advantage(scored(batch, REWARDS)).need("advantages"))


@pytest.mark.parametrize("name", NO_SCALE)
@pytest.mark.parametrize("scale", [2.0**-8, 3.0, 1e8])
def test_the_scale_of_the_rewards_changes_no_normalised_advantage(name: str, scale: float) -> None:
    advantage, batch = NO_SCALE[name], ragged()
    found = advantage(scored(batch, REWARDS * scale)).need("advantages")
    close(found, advantage(scored(batch, REWARDS)).need("advantages"))


def test_order_and_padding_change_no_share_of_silent_groups() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5]
    batch = Batch.from_rewards(rewards, groups=[3, 3, 1, 1, 2, 2, 2])
    order = torch.tensor([6, 2, 0, 4, 3, 1, 5])
    assert share_without_signal(batch) == share_without_signal(batch.select(order)) == 2 / 3
