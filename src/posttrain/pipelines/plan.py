"""An algorithm with every option bound, and the state of the loop between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from posttrain.algorithms.choices import Direction, Estimator, Placement
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.ops import Deviation
from posttrain.algorithms.pieces import facts
from posttrain.types import Batch, Terms

Stage = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An algorithm with its options bound: the functions that the loop calls.

    ``shaping`` changes rewards before the advantage sees them, and ``whiten_rewards`` divides them
    by that deviation; ``correction`` undoes the mismatch of sampler and trainer; ``kl_stop`` ends
    the epochs of a batch once π has moved that far. ``value_loss`` trains a critic, alone for the
    first ``critic_warmup`` steps. ``penalty`` is the coefficient of a loss that penalises the step
    away from π_old, where it follows a target. ``advantage_only`` says that a sequence without
    advantages has neither loss nor gradient.
    """

    advantage: Stage
    loss: Callable[..., Terms]
    weights: Stage
    shaping: tuple[Stage, ...] = ()
    whiten_rewards: Deviation | None = None
    value_loss: Callable[..., Terms] | None = None
    value_coefficient: float = 1.0
    critic_warmup: int = 0
    penalty: Coefficient | None = None
    correction: Stage | None = None
    kl_placement: Placement = "none"
    kl_estimator: Estimator = "k3"
    kl_direction: Direction = "reverse"
    kl_weighted: bool = False
    kl: Coefficient = field(default_factory=lambda: Coefficient(value=0.0))
    refresh_every: int = 0
    entropy_coefficient: float = 0.0
    kl_stop: float = math.inf
    epochs: int = 1
    minibatches: int = 1
    advantage_only: bool = False

    @property
    def needs_inference(self) -> bool:
        """Whether log-probs or values are inferred before the first optimiser step."""
        several_steps = self.epochs * self.minibatches > 1
        compares = self.kl_placement != "none" or self.correction is not None
        ranks = facts(self.loss).whole_batch is not None
        return several_steps or compares or ranks or self.value_loss is not None


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of the loop between steps, beside the weights."""

    step: int = 0
    kl: Coefficient
    penalty: Coefficient | None = None
    baseline: float | None = None
