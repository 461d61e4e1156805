"""The reinforcement-learning loop: every algorithm of the table is this one, with other pieces.

rollouts ─► collate ─► infer ─► shaping ─► advantage ─► [weights ─► step] × epochs ─► sync
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from posttrain.algorithms.advantages import update_baseline
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.objective import (
    with_correction,
    with_entropy,
    with_kl,
    with_mismatch,
    with_values,
)
from posttrain.algorithms.pieces import for_batch
from posttrain.algorithms.shaping import kl_in_reward, whiten_rewards
from posttrain.data.collate import collate
from posttrain.data.minibatch import minibatches
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.guard import Guard, has_no_numbers
from posttrain.pipelines.metrics import batch_metrics, step_metrics
from posttrain.pipelines.plan import Plan
from posttrain.protocols import Learner, Objective, Outputs, StepResult, Sync
from posttrain.types import Batch, Collected, Terms


@dataclass(frozen=True, kw_only=True)
class State:
    """What the loop carries from step to step beside the weights."""

    step: int = 0
    kl: Coefficient
    penalty: Coefficient | None = None
    baseline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """One finished step: what was sampled, the batch with its advantages, and the numbers."""

    state: State
    collected: Collected
    batch: Batch
    metrics: Mapping[str, float]


def train(
    source: Iterable[Collected],
    learner: Learner,
    *,
    plan: Plan,
    sync: Sync,
    pad_token: int,
    seed: int,
    on_step: Callable[[Report], None],
    state: State | None = None,
    audit: Audit | None = None,
    guard: Guard | None = None,
) -> State:
    """Learn from every batch of rollouts that ``source`` yields, until it ends.

    ``source`` samples when it is asked for the next batch, so with a plain generator every batch
    comes from the weights that the last ``sync`` sent: on-policy, lag 0. A source that runs ahead
    brings its own ``sync``, and the loop stays as it is.
    """
    state, guard = state or State(kl=plan.kl, penalty=plan.penalty), guard or Guard()
    asked = time.perf_counter()
    for collected in source:
        waited = time.perf_counter() - asked
        if plan.refresh_every and state.step and state.step % plan.refresh_every == 0:
            learner.refresh_reference()
        collated = collate(collected.rollouts, pad_token=pad_token)
        batch = prepare(collated, learner, plan=plan, state=state)
        staleness = learner.version - float(batch.need("versions").double().mean())
        lost = has_no_numbers(batch)
        if audit is not None and not lost:
            audit.prepared(batch, learner=learner, coefficient=state.kl.value)
        seed_of_step = seed * 1_000_003 + state.step
        if lost:
            results = pass_over(batch, learner, plan=plan, state=state, guard=guard)
            batch = collated.replace(advantages=batch.advantages)  # what was sampled can be told
        else:
            results = optimise(
                batch, learner, plan=plan, state=state, seed=seed_of_step, guard=guard
            )
        learner.version += 1
        learned = time.perf_counter()
        sync(learner.version)
        waited += time.perf_counter() - learned
        if audit is not None:
            audit.learned(results, only_critic=state.step < plan.critic_warmup)
        metrics = batch_metrics(batch, collected) | step_metrics(results)
        metrics |= {"kl/coefficient": state.kl.value, "staleness/mean": staleness}
        metrics["train/skipped_total"] = float(guard.total)
        if state.penalty is not None:
            metrics["policy/penalty"] = state.penalty.value
        metrics |= {"time/wait": waited, "time/train": time.perf_counter() - asked - waited}
        state = _advanced(state, batch, plan=plan, metrics=metrics)
        on_step(Report(state=state, collected=collected, batch=batch, metrics=metrics))
        guard.check()
        asked = time.perf_counter()
    return state


def prepare(batch: Batch, learner: Learner, *, plan: Plan, state: State) -> Batch:
    """Everything between sampling and the first optimiser step: who thought what, and A."""
    if plan.looks_back:
        batch = learner.infer(batch)
    if has_no_numbers(batch):  # nothing can be made of it: no token of it counts
        nothing = torch.zeros_like(batch.tokens, dtype=torch.float32)
        return batch.replace(valid=torch.zeros_like(batch.need("valid")), advantages=nothing)
    for stage in plan.shaping:
        batch = stage(batch)
    if plan.kl_placement == "reward":
        batch = kl_in_reward(
            batch,
            coefficient=state.kl.value,
            estimator=plan.kl_estimator,
            direction=plan.kl_direction,
        )
    if state.baseline is None:  # the first batch has no past: its own mean stands in
        state = replace(state, baseline=update_baseline(None, batch))
    batch = batch.replace(baseline=torch.tensor(state.baseline, dtype=torch.float64))
    seen = batch
    if plan.whiten_rewards is not None:
        seen = whiten_rewards(batch, deviation=plan.whiten_rewards)
    batch = plan.advantage(seen).replace(token_rewards=batch.token_rewards)
    return plan.correction(batch) if plan.correction else batch


def optimise(
    batch: Batch,
    learner: Learner,
    *,
    plan: Plan,
    state: State,
    seed: int,
    guard: Guard | None = None,
) -> list[StepResult]:
    """``epochs × minibatches`` optimiser steps on one batch, fewer if π moves past ``kl_stop``."""
    objective = make_objective(plan, state, batch=batch)
    only_critic = state.step < plan.critic_warmup
    generator = torch.Generator().manual_seed(seed)
    results: list[StepResult] = []
    for part in minibatches(batch, plan.minibatches, epochs=plan.epochs, generator=generator):
        weighted = quiet(plan.weights(part)) if plan.advantage_only else plan.weights(part)
        result = learner.step(weighted, objective, only_critic=only_critic)
        results.append(result)
        if guard is not None:
            guard.saw(result, weighted, step=state.step + 1, number=len(results))
        if not result.skipped and result.metrics.get("approx_kl", 0.0) > plan.kl_stop:
            break
    return results


def pass_over(
    batch: Batch, learner: Learner, *, plan: Plan, state: State, guard: Guard
) -> list[StepResult]:
    """The skipped step on a batch that :func:`prepare` has left no token of: nothing changes."""
    only_critic = state.step < plan.critic_warmup
    objective = make_objective(plan, state, batch=batch)
    result = learner.step(plan.weights(batch), objective, only_critic=only_critic)
    result = replace(result, loss=math.nan, gradient_norm=math.nan, skipped=True)
    guard.saw(result, batch, step=state.step + 1)
    return [result]


def quiet(batch: Batch) -> Batch:
    """Weights 0 for sequences whose advantages are all 0, so that no gradient is computed for them.

    Where every term of the loss is a multiple of the advantage, both were 0 anyway. In a group that
    got everything right, or everything wrong, that is every sequence.
    """
    silent = ((batch.need("advantages") == 0) | ~batch.active).all(dim=1)
    return batch.replace(weights=batch.need("weights").masked_fill(silent[:, None], 0.0))


def make_objective(plan: Plan, state: State, *, batch: Batch) -> Objective:
    """The loss of every token: policy, KL penalty, entropy bonus and critic, each where wanted.

    ``batch`` is the whole batch, of which the objective may then be asked about any part.
    """
    loss = plan.loss
    if state.penalty is not None:
        loss = functools.partial(plan.loss, coefficient=state.penalty.value)
    loss = for_batch(loss, batch)

    def objective(outputs: Outputs, batch: Batch) -> Terms:
        if state.step < plan.critic_warmup:
            nothing = Terms(loss=torch.zeros_like(outputs.need("values")))
            return critic(nothing, outputs, batch=batch)
        logprobs = outputs.need("logprobs")
        terms = with_correction(loss(logprobs, batch), batch)
        terms = replace(terms, parts={"policy": terms.loss})
        if plan.kl_placement == "loss":
            terms = with_kl(
                terms,
                logprobs,
                batch=batch,
                coefficient=state.kl.value,
                estimator=plan.kl_estimator,
                direction=plan.kl_direction,
                weighted=plan.kl_weighted,
            )
        if outputs.entropy is not None:
            terms = with_entropy(
                terms, outputs.entropy, batch=batch, coefficient=plan.entropy_coefficient
            )
        return critic(with_mismatch(terms, batch), outputs, batch=batch)

    def critic(terms: Terms, outputs: Outputs, *, batch: Batch) -> Terms:
        if plan.value_loss is None:
            return terms
        values = plan.value_loss(outputs.need("values"), batch)
        return with_values(terms, values, coefficient=plan.value_coefficient)

    return objective


def _advanced(state: State, batch: Batch, *, plan: Plan, metrics: Mapping[str, float]) -> State:
    size = batch.tokens.shape[0]
    kl, penalty = state.kl, state.penalty
    # A policy that stands still while its critic learns says nothing about β, nor do no scores,
    # nor does a batch of which every step was skipped: its numbers may be none.
    learned = metrics["train/optimiser_steps"] > 0 and bool(batch.active.any())
    if state.step >= plan.critic_warmup and learned:
        kl = kl.update(metrics.get("objective/kl", 0.0), num_sequences=size)
    if penalty is not None and "policy/step_kl" in metrics:
        penalty = penalty.update(metrics["policy/step_kl"], num_sequences=size)
    baseline = update_baseline(state.baseline, batch)
    return State(step=state.step + 1, kl=kl, penalty=penalty, baseline=baseline)
