"""The objective of an RL step: the loss that the pieces of a plan make of the model's outputs."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from posttrain.algorithms.objective import (
    with_correction,
    with_entropy,
    with_kl,
    with_mismatch,
    with_values,
)
from posttrain.algorithms.pieces import Loss, for_batch
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.returned import terms_of
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms


def make_objective(plan: Plan, state: State, *, batch: Batch) -> Objective:
    """The loss of every token: policy, KL penalty, entropy bonus and critic, as the plan has them.

    ``batch`` is the whole batch; the objective can then be evaluated on any part of it.
    """
    if state.step < plan.critic_warmup:
        return Objective(functools.partial(critic_terms, plan=plan), only_critic=True)
    loss = plan.loss
    if state.penalty is not None:
        loss = functools.partial(plan.loss, coefficient=state.penalty.value)
    loss = for_batch(loss, batch)
    return Objective(functools.partial(policy_terms, plan=plan, loss=loss, beta=state.kl.value))


def policy_terms(outputs: Outputs, batch: Batch, *, plan: Plan, loss: Loss, beta: float) -> Terms:
    """ℓ_policy + β·KL − c_H·H + c_V·ℓ_V of every token. Shapes: [B, T]."""
    logprobs = outputs.need("logprobs")
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
