"""The reinforcement-learning loop: every algorithm of the table is this one, with other pieces.

rollouts ─► collate ─► infer ─► shaping ─► advantage ─► [weights ─► step] × epochs ─► sync
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from posttrain.algorithms.advantages import update_baseline
from posttrain.algorithms.kl import Coefficient, Direction, Estimator
from posttrain.algorithms.objective import with_correction, with_entropy, with_kl, with_mismatch
from posttrain.algorithms.shaping import kl_in_reward
from posttrain.algorithms.table import Placement
from posttrain.data.collate import collate
from posttrain.data.minibatch import minibatches
from posttrain.pipelines.metrics import batch_metrics, step_metrics
from posttrain.protocols import Learner, Objective, Outputs, StepResult, Sync
from posttrain.types import Batch, Collected, Terms

Stage = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An algorithm with its options bound: what the loop calls at each place.

    ``shaping`` changes rewards before the advantage sees them; ``correction`` undoes the mismatch
    of sampler and trainer; ``kl_stop`` ends the epochs of a batch once π has moved that far.
    """

    advantage: Stage
    loss: Callable[..., Terms]
    weights: Stage
    shaping: tuple[Stage, ...] = ()
    correction: Stage | None = None
    kl_placement: Placement = "none"
    kl_estimator: Estimator = "k3"
    kl_direction: Direction = "reverse"
    kl: Coefficient = field(default_factory=lambda: Coefficient(value=0.0))
    refresh_every: int = 0
    entropy_coefficient: float = 0.0
    kl_stop: float = math.inf
    epochs: int = 1
    minibatches: int = 1

    @property
    def looks_back(self) -> bool:
        """Whether π_old or a reference must be asked before the first optimiser step."""
        several_steps = self.epochs * self.minibatches > 1
        return several_steps or self.kl_placement != "none" or self.correction is not None


@dataclass(frozen=True, kw_only=True)
class State:
    """What the loop carries from step to step beside the weights."""

    step: int = 0
    kl: Coefficient
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
) -> State:
    """Learn from every batch of rollouts that ``source`` yields, until it ends.

    ``source`` samples when it is asked for the next batch, so with a plain generator every batch
    comes from the weights that the last ``sync`` sent: on-policy, lag 0.
    """
    state = state or State(kl=plan.kl)
    for collected in source:
        started = time.perf_counter()
        if plan.refresh_every and state.step and state.step % plan.refresh_every == 0:
            learner.refresh_reference()
        batch = collate(collected.rollouts, pad_token=pad_token)
        batch = prepare(batch, learner, plan=plan, state=state)
        staleness = learner.version - float(batch.need("versions").double().mean())
        results = optimise(
            batch, learner, plan=plan, kl=state.kl, seed=seed * 1_000_003 + state.step
        )
        learner.version += 1
        sync(learner.version)
        metrics = batch_metrics(batch, collected) | step_metrics(results)
        metrics |= {"kl/coefficient": state.kl.value, "staleness/mean": staleness}
        metrics |= {"time/train": time.perf_counter() - started}
        state = _advanced(state, batch, metrics=metrics)
        on_step(Report(state=state, collected=collected, batch=batch, metrics=metrics))
    return state


def prepare(batch: Batch, learner: Learner, *, plan: Plan, state: State) -> Batch:
    """Everything between sampling and the first optimiser step: who thought what, and A."""
    if plan.looks_back:
        batch = learner.infer(batch)
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
        state = State(step=state.step, kl=state.kl, baseline=update_baseline(None, batch))
    batch = batch.replace(baseline=torch.tensor(state.baseline, dtype=torch.float64))
    batch = plan.advantage(batch)
    return plan.correction(batch) if plan.correction else batch


def optimise(
    batch: Batch, learner: Learner, *, plan: Plan, kl: Coefficient, seed: int
) -> list[StepResult]:
    """``epochs × minibatches`` optimiser steps on one batch, fewer if π moves past ``kl_stop``."""
    objective = make_objective(plan, kl)
    generator = torch.Generator().manual_seed(seed)
    results: list[StepResult] = []
    for part in minibatches(batch, plan.minibatches, epochs=plan.epochs, generator=generator):
        results.append(learner.step(plan.weights(part), objective))
        if results[-1].metrics.get("approx_kl", 0.0) > plan.kl_stop:
            break
    return results


def make_objective(plan: Plan, kl: Coefficient) -> Objective:
    """The loss of every token: policy, then the KL penalty and the entropy bonus where wanted."""

    def objective(outputs: Outputs, batch: Batch) -> Terms:
        terms = with_correction(plan.loss(outputs.logprobs, batch), batch)
        if plan.kl_placement == "loss":
            terms = with_kl(
                terms,
                outputs.logprobs,
                batch=batch,
                coefficient=kl.value,
                estimator=plan.kl_estimator,
                direction=plan.kl_direction,
            )
        if outputs.entropy is not None:
            terms = with_entropy(
                terms, outputs.entropy, batch=batch, coefficient=plan.entropy_coefficient
            )
        return with_mismatch(terms, batch)

    return objective


def _advanced(state: State, batch: Batch, *, metrics: Mapping[str, float]) -> State:
    size = batch.tokens.shape[0]
    kl = state.kl.update(metrics.get("kl/reference", 0.0), num_sequences=size)
    return State(step=state.step + 1, kl=kl, baseline=update_baseline(state.baseline, batch))
