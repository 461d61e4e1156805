"""An algorithm with every option bound, the loss that its pieces make, and the loop's state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.choices import Direction, Estimator, Placement
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.objective import (
    with_correction,
    with_entropy,
    with_kl,
    with_mismatch,
    with_values,
)
from posttrain.algorithms.ops import Deviation
from posttrain.algorithms.pieces import Loss, divergence_of, facts, for_batch, needed
from posttrain.protocols import Objective, Outputs
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
    advantages has neither loss nor gradient. ``recorded_tokens`` is for how many tokens of a batch
    the results hold every number.
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
    recorded_tokens: int = 0

    @property
    def needs_inference(self) -> bool:
        """Whether log-probs or values are inferred before the first optimiser step."""
        several_steps = self.epochs * self.minibatches > 1
        compares = self.kl_placement != "none" or self.correction is not None
        ranks = facts(self.loss).whole_batch is not None
        taught = "teacher_logprobs" in needed(self.advantage) | needed(self.loss)
        return several_steps or compares or ranks or taught or self.value_loss is not None


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of the loop between steps, beside the weights."""

    step: int = 0
    kl: Coefficient
    penalty: Coefficient | None = None
    baseline: float | None = None


def make_objective(plan: Plan, state: State, *, batch: Batch) -> Objective:
    """The loss of every token: policy, KL penalty, entropy bonus and critic, as the plan has them.

    ``batch`` is the whole batch; the objective can then be evaluated on any part of it.
    """
    if state.step < plan.critic_warmup:
        return Objective(functools.partial(critic_terms, plan=plan), only_critic=True)
    loss = plan.loss
    if state.penalty is not None:
        loss = functools.partial(plan.loss, coefficient=state.penalty.value)
    divergence, loss = divergence_of(loss), for_batch(loss, batch)
    terms = functools.partial(policy_terms, plan=plan, loss=loss, beta=state.kl.value)
    return Objective(terms, divergence=divergence)


def policy_terms(outputs: Outputs, batch: Batch, *, plan: Plan, loss: Loss, beta: float) -> Terms:
    """ℓ_policy + β·KL − c_H·H + c_V·ℓ_V of every token. Shapes: [B, T]."""
    logprobs = outputs.need("logprobs")
    if outputs.divergence is not None:
        batch = batch.replace(divergence=outputs.divergence)
    terms = with_correction(terms_of(loss, logprobs, batch=batch), batch)
    terms = replace(terms, parts={"policy": terms.loss})
    if plan.kl_placement == "loss":
        terms = with_kl(
            terms,
            logprobs,
            batch=batch,
            coefficient=beta,
            estimator=plan.kl_estimator,
            direction=plan.kl_direction,
            weighted=plan.kl_weighted,
        )
    if outputs.entropy is not None:
        terms = with_entropy(
            terms, outputs.entropy, batch=batch, coefficient=plan.entropy_coefficient
        )
    return _with_critic(with_mismatch(terms, batch), outputs, batch=batch, plan=plan)


def critic_terms(outputs: Outputs, batch: Batch, *, plan: Plan) -> Terms:
    """c_V·ℓ_V of every token, and nothing of the policy. Shapes: [B, T]."""
    nothing = Terms(loss=torch.zeros_like(outputs.need("values")))
    return _with_critic(nothing, outputs, batch=batch, plan=plan)


def _with_critic(terms: Terms, outputs: Outputs, *, batch: Batch, plan: Plan) -> Terms:
    if plan.value_loss is None:
        return terms
    values = terms_of(plan.value_loss, outputs.need("values"), batch=batch)
    return with_values(terms, values, coefficient=plan.value_coefficient)


def with_field(function: Callable[[Batch], Batch], batch: Batch, *, field: str) -> Batch:
    """What a piece makes of a batch; an error names the piece where it has not added the field."""
    result: Any = function(batch)
    if isinstance(result, Batch) and getattr(result, field) is not None:
        return result
    what = f"the batch without {field}" if isinstance(result, Batch) else described(result)
    raise ValueError(
        f"{name_of(function)} returned {what}; it has to return the batch with {field} [B, T]: "
        f"`return batch.replace({field}=…)`"
    )


def terms_of(loss: Loss, predicted: Tensor, *, batch: Batch) -> Terms:
    """The terms of a loss; an error names the loss where it returns none for every token."""
    result: Any = loss(predicted, batch)
    if isinstance(result, Terms) and getattr(result.loss, "shape", None) == predicted.shape:
        return result
    what = f"Terms(loss={described(result.loss)})" if isinstance(result, Terms) else None
    raise ValueError(
        f"{name_of(loss)} returned {what or described(result)}; it has to return "
        f"posttrain.types.Terms(loss=…) with a term for every token, {[*predicted.shape]} here; "
        "what each counts is decided by rl.weights"
    )


def name_of(function: Callable[..., Any]) -> str:
    """A function as a recipe names it, whatever options are bound to it.

    >>> name_of(functools.partial(described, value=1))
    'posttrain.pipelines.plan:described'
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def described(value: Any) -> str:
    """A value by its type, and a tensor by its shape.

    >>> described(None), described(Batch.from_rewards([1.0]).rewards)
    ('None', 'a Tensor of shape [1]')
    """
    if value is None:
        return "None"
    shape = f" of shape {[*value.shape]}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
