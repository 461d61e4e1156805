"""A sequence whose grader broke enters no baseline, advantage, weight, loss or metric.

Each number of the whole batch must be that of the batch without the broken sequence.
"""

import math

import pytest
import torch
from algorithms.batches import BROKEN, close, moved, ragged, ready
from algorithms.recipes import ADVANTAGE_VARIANTS, OUTCOMES, WEIGHT_VARIANTS, outcome, prepared
from torch import Tensor

from posttrain.algorithms import corrections
from posttrain.algorithms.advantages import update_baseline
from posttrain.algorithms.diagnostics import share_without_signal
from posttrain.types import Batch

REST = torch.tensor([row for row in range(12) if row != BROKEN])


def without(batch: Batch) -> Batch:
    """The same batch as if the broken sequence had never been sampled, and nobody marked."""
    return batch.select(REST).replace(valid=None)


def is_as_if_absent(found: Tensor, wanted: Tensor) -> None:
    assert found[BROKEN].tolist() == [0.0] * found.shape[1]
    close(found[REST], wanted)


PER_TOKEN = ("gae", "gae, raw", "gae, two steps", "return_to_go", "discounted")
PER_TOKEN += ("discounted, whitened", "gae, sample", "turn_return_to_go", "turns, discounted")
PER_TOKEN += ("turn_group_normalised", "turns, population")


@pytest.mark.parametrize("name", ADVANTAGE_VARIANTS)
def test_advantages(name: str) -> None:
    check_advantage(name, ragged())


@pytest.mark.parametrize("name", [name for name in ADVANTAGE_VARIANTS if name not in PER_TOKEN])
def test_advantages_from_the_score_alone(name: str) -> None:
    check_advantage(name, ragged().replace(token_rewards=None))


def check_advantage(name: str, batch: Batch) -> None:
    advantage = ADVANTAGE_VARIANTS[name]
    assert math.isnan(batch.need("rewards")[BROKEN])
    made, wanted = advantage(batch), advantage(without(batch))
    is_as_if_absent(made.need("advantages"), wanted.need("advantages"))
    if made.returns is not None:
        is_as_if_absent(made.returns, wanted.need("returns"))


@pytest.mark.parametrize("name", WEIGHT_VARIANTS)
def test_weights(name: str) -> None:
    weigh = WEIGHT_VARIANTS[name]
    wanted = weigh(without(ragged())).need("weights")
    is_as_if_absent(weigh(ragged()).need("weights"), wanted)


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_corrections(name: str) -> None:
    correct = corrections.CORRECTIONS[name]
    for level in ("token", "sequence", "geometric"):
        wanted = correct(without(ragged()), level=level).need("correction")
        is_as_if_absent(correct(ragged(), level=level).need("correction"), wanted)


@pytest.mark.parametrize("name", OUTCOMES)
def test_losses_and_metrics(name: str) -> None:
    outputs = moved(ready())
    loss, gradient, metrics = outcome(name, outputs, prepared(ready()))
    wanted = outcome(name, outputs[REST], prepared(without(ready())))
    close(loss, wanted[0])
    is_as_if_absent(gradient, wanted[1])
    assert metrics == pytest.approx(wanted[2], rel=1e-12)


def test_the_running_mean_and_the_share_of_silent_groups() -> None:
    batch = ragged().replace(token_rewards=None)
    assert update_baseline(0.5, batch) == pytest.approx(update_baseline(0.5, without(batch)))
    rewards = batch.need("rewards").clone()
    rewards[torch.tensor([3, 9, 11])] = 0.7  # the siblings of the broken one all agree
    batch = batch.replace(rewards=rewards)
    assert share_without_signal(batch) == share_without_signal(without(batch)) == 0.25
