"""The reinforcement-learning loop: every algorithm of the table is this one, with other pieces.

rollouts ─► collate ─► infer ─► shaping ─► advantage ─► [weights ─► step] × epochs ─► sync
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.algorithms.advantages import update_baseline
from posttrain.algorithms.shaping import kl_in_reward, whiten_rewards
from posttrain.data.collate import collate
from posttrain.data.minibatch import minibatch_rows
from posttrain.pipelines.guard import as_skipped, is_finite
from posttrain.pipelines.metrics import batch_metrics, kl_to_reference, step_metrics
from posttrain.pipelines.plan import Plan, State, make_objective, with_field
from posttrain.protocols import Learner, StepResult, Sync
from posttrain.types import Batch, Collected, draw_seed


@dataclass(frozen=True, kw_only=True)
class Step:
    """One finished step: the rollouts, the batch with its advantages, and the results.

    ``before`` is the state that it was taken in, ``state`` the next one's; ``version`` is that of
    the policy that learned from the batch.
    """

    before: State
    state: State
    version: int
    collected: Collected
    batch: Batch
    results: Sequence[StepResult]

    def metrics(self) -> Mapping[str, float]:
        """The numbers of the step, by the names that ``docs/metrics.md`` explains."""
        batch = finite_fields(self.batch)
        metrics = batch_metrics(batch, self.collected) | step_metrics(self.results)
        metrics["kl/coefficient"] = self.before.kl.value
        metrics["staleness/mean"] = self.version - float(batch.need("versions").double().mean())
        if self.before.penalty is not None:
            metrics["policy/penalty"] = self.before.penalty.value
        return metrics


def train(
    source: Iterable[Collected],
    learner: Learner,
    *,
    plan: Plan,
    sync: Sync,
    pad_token: int,
    seed: int,
    on_step: Callable[[Step], None],
    state: State | None = None,
) -> State:
    """Learn from every batch of rollouts that ``source`` yields, until it ends.

    ``source`` samples when it is asked for the next batch, so with a plain generator every batch
    comes from the weights that the last ``sync`` sent: on-policy, lag 0. A source that runs ahead
    brings its own ``sync``, and the loop stays as it is. Monitoring wraps a part of the loop:
    :mod:`posttrain.pipelines.guard` the learner, :mod:`posttrain.pipelines.clock` source and sync,
    :mod:`posttrain.pipelines.audit` what is done after a step.
    """
    state = state or State(kl=plan.kl, penalty=plan.penalty)
    for collected in source:
        batch = collate(collected.rollouts, pad_token=pad_token)
        batch = prepare(batch, learner, plan=plan, state=state)
        results = optimise(batch, learner, plan=plan, state=state, seed=seed)
        learner.version += 1
        sync(learner.version)
        before, state = state, advance(state, batch, results=results, plan=plan)
        on_step(
            Step(
                before=before,
                state=state,
                version=learner.version - 1,
                collected=collected,
                batch=batch,
                results=results,
            )
        )
    return state


def prepare(batch: Batch, learner: Learner, *, plan: Plan, state: State) -> Batch:
    """All that a batch needs before the first step: log-probs, values, shaping, advantages."""
    if plan.refresh_every and state.step and state.step % plan.refresh_every == 0:
        learner.refresh_reference()
    if plan.needs_inference:
        batch = learner.infer(batch)
    if not is_finite(batch):
        return batch.replace(advantages=torch.zeros_like(batch.tokens, dtype=torch.float32))
    return with_advantages(batch, plan=plan, state=state)


def with_advantages(batch: Batch, *, plan: Plan, state: State) -> Batch:
    """The batch with shaped rewards, advantages, and the correction of sampler and trainer."""
    for stage in plan.shaping:
        batch = stage(batch)
    if plan.kl_placement == "reward":
        batch = kl_in_reward(
            batch,
            coefficient=state.kl.value,
            estimator=plan.kl_estimator,
            direction=plan.kl_direction,
        )
    if state.baseline is None:  # the first batch has no running mean yet: its own mean stands in
        state = replace(state, baseline=update_baseline(None, batch))
    batch = batch.replace(baseline=torch.tensor(state.baseline, dtype=torch.float64))
    seen = batch
    if plan.whiten_rewards is not None:
        seen = whiten_rewards(batch, deviation=plan.whiten_rewards)
    made = with_field(plan.advantage, seen, field="advantages")
    batch = made.replace(token_rewards=batch.token_rewards)
    return plan.correction(batch) if plan.correction else batch


def weighed(batch: Batch, plan: Plan) -> Batch:
    """The batch with what each token counts in its update."""
    return with_field(plan.weights, batch, field="weights")


def finite_fields(batch: Batch) -> Batch:
    """The batch for metrics: without inferred log-probs and values where they are not finite."""
    if is_finite(batch):
        return batch
    return batch.replace(old_logprobs=None, ref_logprobs=None, teacher_logprobs=None, values=None)


def optimise(
    batch: Batch, learner: Learner, *, plan: Plan, state: State, seed: int
) -> list[StepResult]:
    """``epochs × minibatches`` optimiser steps on one batch, fewer if π moves past ``kl_stop``.

    A batch that is not finite gets one step without active tokens, reported as skipped.
    """
    objective = make_objective(plan, state, batch=batch)
    if not is_finite(batch):
        nothing = batch.replace(valid=torch.zeros_like(batch.need("valid")))
        nothing = weighed(nothing, plan)
        return [as_skipped(learner.step(nothing, objective))]
    generator = torch.Generator().manual_seed(draw_seed(seed, state.step))
    results: list[StepResult] = []
    recorded = recorded_rows(batch, plan.recorded_tokens)
    parts = minibatch_rows(batch, plan.minibatches, epochs=plan.epochs, generator=generator)
    for rows in parts:
        weighted = weighed(batch if plan.minibatches == 1 else batch.select(rows), plan)
        if plan.advantage_only:
            weighted = without_zero_advantages(weighted)
        if recorded is None:
            result = learner.step(weighted, objective)
        else:
            kept = recorded[rows]
            result = learner.step(weighted, replace(objective, recorded=kept))
            known = {"rows": rows[kept], "weights": weighted.need("weights")[kept]}
            result = replace(result, tokens={**result.tokens, **known})
        results.append(result)
        if not result.skipped and result.metrics.get("approx_kl", 0.0) > plan.kl_stop:
            break
    return results


def recorded_rows(batch: Batch, num_tokens: int) -> Tensor | None:
    """[B] bool: the first groups of a batch that have so many tokens, one at least; None for 0.

    >>> batch = Batch.from_rewards([1.0, 0.0, 0.0], groups=[4, 4, 5])
    >>> recorded_rows(batch, 1), recorded_rows(batch, 3)
    (tensor([ True,  True, False]), tensor([True, True, True]))
    """
    if not num_tokens:
        return None
    groups, lengths = batch.need("groups").tolist(), batch.mask.sum(dim=1).tolist()
    sizes: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        sizes[group] = sizes.get(group, 0) + length
    kept, used = set[int](), 0
    for group, size in sizes.items():
        used += size
        if kept and used > num_tokens:
            break
        kept.add(group)
    return torch.tensor([group in kept for group in groups])


def without_zero_advantages(batch: Batch) -> Batch:
    """Weights 0 for sequences whose advantages are all 0, so that no gradient is computed for them.

    For losses whose every term is a multiple of the advantage: loss and gradient are 0 anyway. In
    a group with equal rewards that holds for every sequence.
    """
    zero = ((batch.need("advantages") == 0) | ~batch.active).all(dim=1)
    return batch.replace(weights=batch.need("weights").masked_fill(zero[:, None], 0.0))


def advance(state: State, batch: Batch, *, results: Sequence[StepResult], plan: Plan) -> State:
    """The state of the next step: the coefficients follow what this one measured."""
    size, numbers = batch.tokens.shape[0], step_metrics(results)
    kl, penalty = state.kl, state.penalty
    # β follows the policy: not while only the critic learns, nor after a batch without valid
    # scores, nor after one of which every step was skipped, whose numbers may not be finite.
    learned = numbers["train/optimiser_steps"] > 0 and bool(batch.active.any())
    if state.step >= plan.critic_warmup and learned:
        kl = kl.update(kl_to_reference(batch) or 0.0, num_sequences=size)
    if penalty is not None and "policy/step_kl" in numbers:
        penalty = penalty.update(numbers["policy/step_kl"], num_sequences=size)
    baseline = update_baseline(state.baseline, batch)
    return State(step=state.step + 1, kl=kl, penalty=penalty, baseline=baseline)
