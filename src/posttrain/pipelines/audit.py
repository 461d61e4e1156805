"""The checklist of a PPO iteration, as code: an audited run stops at the first check that fails.

The checks are those that a reader of the algorithm would do by hand. None of the library's own
mathematics is used in them: sums are taken in plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from posttrain.algorithms.ops import Deviation
from posttrain.pipelines.guard import is_finite
from posttrain.pipelines.plan import Plan
from posttrain.pipelines.rl import Step
from posttrain.protocols import StepResult
from posttrain.types import Batch

Normalised = Literal["batch", "group", "turn", "none"]

CHECKLIST = {
    "frozen": "Rollouts came from one frozen version of the policy",
    "copied": "New weights were copied back to the engine before it sampled",
    "rewards": "Rewards hold the score and the KL penalty to the reference",
    "detached": "Old log-probs, values and advantages carry no gradient",
    "normalised": "Advantages are normalised over the policy's own tokens",
    "ratio": "The ratio of new to old policy is 1 at the first optimiser step",
    "losses": "Actor, critic and entropy bonus each have their part in the loss",
    "epochs": "All epochs and minibatches were taken, or the KL stopped them",
}


class AuditFailed(RuntimeError):  # noqa: N818 - named after what happened
    """A line of the checklist does not hold."""


class Audit:
    """Checks every iteration; ``tolerance`` is the rounding by which a ratio may differ from 1.

    ``normalised`` says over what the advantage has mean 0: the batch (and then deviation 1 too),
    each group, each turn of a group, or nothing; ``deviation`` says of which kind that 1 is.
    Rollouts that run ``max_lag`` updates ahead are that old, no more and no less, and engine and
    learner need not agree on them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        normalised: Normalised,
        deviation: Deviation = "population",
        tolerance: float = 1e-4,
        max_lag: int = 0,
    ) -> None:
        self._plan = plan
        self._max_lag = max_lag
        self._stale = False
        self._normalised = normalised
        self._lost = 1 if deviation == "sample" else 0  # degrees of freedom lost to the mean
        self._tolerance = tolerance
        self._step = 0
        self._mismatch: float | None = None

    def check(self, step: Step) -> None:
        """Check a finished step, before its metrics are logged."""
        self._step = step.version + 1
        if is_finite(step.batch):
            self._prepared(step.batch, version=step.version, coefficient=step.before.kl.value)
        only_critic = step.before.step < self._plan.critic_warmup
        self._learned(step.results, only_critic=only_critic)

    def _prepared(self, batch: Batch, *, version: int, coefficient: float) -> None:
        """The batch after the advantage, as the optimiser steps found it."""
        self._detached(batch)  # first, because the other checks read values of the tensors
        self._frozen(batch, version)
        self._copied(batch)
        self._rewards(batch, coefficient)
        self._advantages(batch)

    def _learned(self, results: Sequence[StepResult], *, only_critic: bool) -> None:
        """The optimiser steps that were taken on the batch."""
        self._epochs(results)
        taken = [result for result in results if result.metrics and not result.skipped]
        if not taken:  # all steps were skipped: no active token, or no finite loss
            return
        if not only_critic:
            self._ratio(taken[0])
            self._agree(taken[0].metrics.get("mismatch"))
        self._losses(taken[0], only_critic=only_critic)

    def _check(self, holds: bool, line: str, *, found: str) -> None:
        if not holds:
            raise AuditFailed(
                f"audit: step {self._step}: broken: {CHECKLIST[line]}. Found: {found}"
            )

    def _frozen(self, batch: Batch, version: int) -> None:
        versions = sorted(set(batch.need("versions").tolist()))
        self._check(len(versions) == 1, "frozen", found=f"rollouts of the versions {versions}")
        found = f"rollouts of version {versions[0]}, and the learner is at {version}"
        expected = max(0, version - self._max_lag)
        self._check(versions[0] == expected, "copied", found=found)
        self._stale = expected < version

    def _copied(self, batch: Batch) -> None:
        """Engine and learner agree on log-probs: they had equal weights before the first step."""
        old, sampled = batch.old_logprobs, batch.sampler_logprobs
        if old is not None and sampled is not None and bool(batch.active.any()):
            self._agree(float((old - sampled)[batch.active].abs().mean()))

    def _agree(self, mismatch: float | None) -> None:
        if mismatch is None or self._stale:
            return
        if self._mismatch is None:
            self._mismatch = mismatch
        most = 5 * self._mismatch + self._tolerance
        found = f"engine and learner differ by {mismatch:.2g} nats a token, {most:.2g} are rounding"
        self._check(mismatch <= most, "copied", found=found)

    def _rewards(self, batch: Batch, coefficient: float) -> None:
        plan = self._plan
        if plan.kl_placement != "none":
            self._check(batch.ref_logprobs is not None, "rewards", found="no reference log-probs")
        if batch.token_rewards is None:
            self._check(plan.kl_placement != "reward", "rewards", found="no token rewards")
            return
        beta = coefficient if plan.kl_placement == "reward" else 0.0
        active, rewards = batch.active.tolist(), batch.need("rewards").tolist()
        given = batch.token_rewards.tolist()
        for row, chosen in enumerate(active):
            if not any(chosen):
                continue
            expected = rewards[row]
            for column in range(len(chosen)):
                if chosen[column] and beta:
                    expected -= beta * self._divergence(batch, row, column=column)
            total = sum(r for r, is_active in zip(given[row], chosen, strict=True) if is_active)
            found = f"sequence {row} was given {total:.6g}, score and KL make {expected:.6g}"
            holds = math.isclose(total, expected, rel_tol=1e-4, abs_tol=1e-4)
            self._check(holds, "rewards", found=found)

    def _divergence(self, batch: Batch, row: int, *, column: int) -> float:
        new = float(batch.need("old_logprobs")[row, column])
        distance = float(batch.need("ref_logprobs")[row, column]) - new
        estimator, forward = self._plan.kl_estimator, self._plan.kl_direction == "forward"
        if estimator == "k2":
            return distance**2 / 2
        weight = math.exp(min(distance, 50.0))
        if estimator == "k1":
            return weight * distance if forward else -distance
        return weight * distance - weight + 1 if forward else weight - distance - 1

    def _detached(self, batch: Batch) -> None:
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
            tensor = getattr(batch, name)
            held = tensor is None or not tensor.requires_grad
            self._check(held, "detached", found=f"{name} would be differentiated")

    def _advantages(self, batch: Batch) -> None:
        advantages, active = batch.need("advantages"), batch.active
        stray = float(advantages[~active].abs().sum())
        found = f"tokens that the policy did not choose, or broken scores, have {stray:.3g}"
        self._check(stray == 0, "normalised", found=found)
        if self._normalised == "batch" and bool(active.any()):
            values = advantages[active].double().tolist()
            mean = sum(values) / len(values)
            squares = sum((value - mean) ** 2 for value in values)
            deviation = math.sqrt(squares / max(1, len(values) - self._lost))
            found = f"mean {mean:.3g} and deviation {deviation:.3g}"
            even = deviation == 0 or abs(deviation - 1) < 1e-3
            self._check(abs(mean) < 1e-4 and even, "normalised", found=found)
        if self._normalised in ("group", "turn"):
            self._groups(batch)

    def _groups(self, batch: Batch) -> None:
        """Of every group, or of every turn of it, the advantages of its sequences add up to 0."""
        turns = None if self._normalised == "group" or batch.turns is None else batch.turns
        sums: dict[tuple[int, int], list[float]] = {}
        for row, group in enumerate(batch.need("groups").tolist()):
            chosen = batch.need("advantages")[row][batch.active[row]].double().tolist()
            places = [0] * len(chosen) if turns is None else turns[row][batch.active[row]].tolist()
            for place in set(places):
                own = [value for value, at in zip(chosen, places, strict=True) if at == place]
                sums.setdefault((group, place), []).append(sum(own) / len(own))
        for (group, place), means in sums.items():
            total, which = sum(means), "" if turns is None else f"turn {place + 1} of "
            found = f"the advantages of {which}group {group} add up to {total:.3g}, not to 0"
            self._check(abs(total) < 1e-3 * len(means), "normalised", found=found)

    def _ratio(self, first: StepResult) -> None:
        ratio, spread = first.metrics.get("ratio", 1.0), first.metrics.get("ratio_variance", 0.0)
        found = f"mean {ratio:.6g}, deviation {math.sqrt(spread):.3g}"
        near = abs(ratio - 1) <= self._tolerance and math.sqrt(spread) <= 10 * self._tolerance
        self._check(near, "ratio", found=found)

    def _losses(self, first: StepResult, *, only_critic: bool) -> None:
        plan = self._plan
        wanted = {"policy_loss": not only_critic, "value_loss": plan.value_loss is not None}
        wanted["entropy_loss"] = plan.entropy_coefficient > 0 and not only_critic
        missing = [name for name, is_wanted in wanted.items() if is_wanted]
        missing = [name for name in missing if name not in first.metrics]
        self._check(not missing, "losses", found=f"no {' and no '.join(missing)}")

    def _epochs(self, results: Sequence[StepResult]) -> None:
        planned = self._plan.epochs * self._plan.minibatches
        stopped = results[-1].metrics.get("approx_kl", 0.0) > self._plan.kl_stop
        found = f"{len(results)} of {planned} optimiser steps, and no KL above the limit"
        self._check(len(results) == planned or stopped, "epochs", found=found)
