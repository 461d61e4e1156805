"""Value losses and what they report, token by token against plain Python."""

import math
from collections.abc import Callable

import pytest
import torch
from algorithms.batches import close, ready, refuses
from torch import Tensor

from posttrain.algorithms.losses import VALUE_LOSSES, clipped_value, huber, squared
from posttrain.types import Batch, Terms

# (value, value when the batch was made, return): free, held above, held below, held but farther.
CASES = [
    (0.1, 0.0, 1.0),
    (0.9, 0.0, 1.0),
    (-0.9, 0.0, -1.0),
    (0.9, 0.0, -1.0),
    (3.0, 2.5, 0.5),
    (1.0, 1.0, 1.0),
    (-2.0, 1.0, 4.0),
    (1.5, 1.5, 1.0),
]


def run(
    loss: Callable[..., Terms], cases: list[tuple[float, float, float]], **options: float
) -> tuple[Terms, Tensor]:
    value, old, returns = torch.tensor(cases, dtype=torch.float64).T[:, :, None]
    batch = Batch.from_rewards([0.0] * len(cases)).replace(values=old, returns=returns)
    value = value.clone().requires_grad_()
    terms = loss(value, batch, **options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), value)
    return terms, gradient


def test_the_table_holds_the_three_losses() -> None:
    assert {"squared": squared, "clipped": clipped_value, "huber": huber} == VALUE_LOSSES


def test_squared_error_is_halved() -> None:
    terms, gradient = run(squared, CASES)
    close(terms.loss.detach()[:, 0], [(value - target) ** 2 / 2 for value, _, target in CASES])
    close(gradient[:, 0], [value - target for value, _, target in CASES])
    assert not terms.means["value_clip"].any()


@pytest.mark.parametrize("clip", [None, 0.05, 0.7])
def test_clipped_value_takes_the_worse_of_the_free_and_the_held_value(clip: float | None) -> None:
    terms, gradient = run(clipped_value, CASES, **({} if clip is None else {"clip": clip}))
    reach = 0.2 if clip is None else clip
    losses, slopes, stopped = [], [], []
    for value, old, target in CASES:
        held = min(max(value, old - reach), old + reach)
        farther = abs(held - target) > abs(value - target)
        losses.append(max((value - target) ** 2, (held - target) ** 2) / 2)
        slopes.append(0.0 if farther else value - target)
        stopped.append(float(farther))
    close(terms.loss.detach()[:, 0], losses)
    close(gradient[:, 0], slopes)
    assert terms.means["value_clip"][:, 0].tolist() == stopped
    assert 0 < sum(stopped) < len(CASES)


@pytest.mark.parametrize("delta", [None, 0.5, 1.5])
def test_huber_is_square_near_and_straight_far_away(delta: float | None) -> None:
    terms, gradient = run(huber, CASES, **({} if delta is None else {"delta": delta}))
    bend = 1.0 if delta is None else delta
    losses, slopes = [], []
    for value, _, target in CASES:
        error = value - target
        near = abs(error) <= bend
        losses.append(error**2 / 2 if near else bend * (abs(error) - bend / 2))
        slopes.append(error if near else math.copysign(bend, error))
    close(terms.loss.detach()[:, 0], losses)
    close(gradient[:, 0], slopes)
    assert not terms.means["value_clip"].any()


@pytest.mark.parametrize("loss", VALUE_LOSSES.values())
def test_what_every_value_loss_reports(loss: Callable[..., Terms]) -> None:
    terms, _ = run(loss, CASES)
    reports = {
        "value": [value for value, _, _ in CASES],
        "return": [target for _, _, target in CASES],
        "return_squared": [target**2 for _, _, target in CASES],
        "value_error": [target - value for value, _, target in CASES],
        "value_error_squared": [(target - value) ** 2 for value, _, target in CASES],
    }
    assert list(terms.means) == [*reports, "value_clip"]
    for name, expected in reports.items():
        close(terms.means[name][:, 0], expected)
        assert not terms.means[name].requires_grad
    assert terms.maxima == {}


@pytest.mark.parametrize("loss", VALUE_LOSSES.values())
def test_targets_and_earlier_values_are_constants(loss: Callable[..., Terms]) -> None:
    batch = ready()
    returns, old = batch.need("returns").requires_grad_(), batch.need("values").requires_grad_()
    values = torch.zeros(12, 10, dtype=torch.float64, requires_grad=True)
    loss(values, batch.replace(returns=returns, values=old)).loss.sum().backward()
    assert returns.grad is None
    assert old.grad is None
    assert values.grad is not None
    assert values.grad[batch.active].abs().sum() > 1


@pytest.mark.parametrize("loss", VALUE_LOSSES.values())
def test_values_of_another_shape_are_refused(loss: Callable[..., Terms]) -> None:
    with refuses(
        "values: expected shape [12, 10], got [12, 1]; every [B, T] tensor is indexed by the "
        "token it is about"
    ):
        loss(torch.zeros(12, 1), ready())


@pytest.mark.parametrize("value", [0.0, -0.2, math.inf])
def test_ranges_of_the_value_losses_are_positive(value: float) -> None:
    with refuses(f"clip: must be > 0, got {value}"):
        clipped_value(torch.zeros(12, 10), ready(), clip=value)
    with refuses(f"delta: must be > 0, got {value}"):
        huber(torch.zeros(12, 10), ready(), delta=value)
