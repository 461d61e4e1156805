"""What watches the RL loop: after every step its numbers, rollouts, evaluations, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.build.declared_ways import Ways
from posttrain.build.sampler import Flow
from posttrain.build.scoring import workers_died
from posttrain.build.setup import Setup
from posttrain.config import EvalSection
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.guard import Guarded
from posttrain.pipelines.rl import Step
from posttrain.protocols import Engine
from posttrain.runs import Ledger, RolloutWriter, token_ages
from posttrain.stages.evaluation import answers, check_held_out, evaluate_policy
from posttrain.stages.open_stage import OpenStage, keep_rollouts
from posttrain.stages.rl_resume import lag_of, rl_state
from posttrain.track.neighbours import Neighbours
from posttrain.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What happens after every RL step: numbers, rollouts, evaluations, checkpoints."""

    setup: Setup
    stage: OpenStage
    engine: Engine
    learner: Guarded
    flow: Flow
    prompts: Sequence[Prompt]
    order: Callable[[int], Any]  # the state of the order of prompts at a position
    writer: RolloutWriter
    ledger: Ledger
    audit: Audit | None
    seconds: Callable[[], Mapping[str, float]]
    ways: Ways
    done: Callable[[Step], None]
    neighbours: Neighbours = field(default_factory=Neighbours)

    def __post_init__(self) -> None:
        self.stage.callbacks.generate = self.generate

    def on_step(self, taken: Step) -> None:
        """Record a finished step, and stop the run where audit or guard say so."""
        if self.audit is not None:
            self.audit.check(taken)
        section, guard = self.setup.recipe.rl, self.learner.guard
        step = taken.state.step
        metrics = {**taken.metrics(), "train/skipped_total": float(guard.total)}
        if section.partial > 1:
            metrics |= token_ages(taken.collected.rollouts, taken.version)
        metrics |= {**self.seconds(), **self.setup.cluster_metrics()}
        metrics["time/step"] = metrics["time/wait"] + metrics["time/train"]
        if self.setup.cluster is not None:
            metrics["cluster/learner_idle"] = metrics["time/wait"] / metrics["time/step"]
        waited = self.neighbours.waited()
        if waited is not None:
            metrics["time/core_wait"] = waited
        remark = self.neighbours.remark(metrics["time/step"] / max(1, metrics["rollout/tokens"]))
        if remark:
            self.stage.keeper.warn(remark)
        self.ways.look()
        self.ledger.trained(step, taken.collected)
        keep_rollouts(self.stage, taken, writer=self.writer, tokenizer=self.setup.policy.tokenizer)
        every = section.evaluate_every
        if every and (step % every == 0 or step == section.steps):
            metrics |= self.evaluate()
        metrics |= workers_died(self.setup.scorer, "reward/workers_died")
        callbacks = self.stage.callbacks
        self.stage.log(step, metrics, rollouts=taken.collected.rollouts)
        # What run.keep_best goes by: the accuracy, where something checks answers.
        accuracy = metrics.get("eval/accuracy" if self.setup.marks.check else "eval/reward")
        more = rl_state(
            taken,
            self.flow.waiting(),
            prompts=self.prompts,
            order=self.order,
            lag=lag_of(section),
            accuracy=accuracy,
        )
        self.stage.keeper.stepped(
            step,
            learner=self.learner,
            every=section.save_every,
            last=step == section.steps or callbacks.ended,
            must=callbacks.failure is not None,
            more=lambda place: self._on_disk({**more(place), **callbacks.state()}),
        )
        self.done(taken)
        callbacks.check()
        guard.check()

    def _on_disk(self, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        self.writer.wait()  # a checkpoint never knows more than the disk
        self.ledger.wait()
        return numbers

    def generate(self, prompts: Sequence[str], **drawn: Any) -> list[Rollout]:
        """What the policy answers now: for callbacks."""
        with self.flow.idle():
            return answers(self.setup, prompts, engine=self.engine, **drawn)

    def evaluate(self) -> dict[str, float]:
        """Accuracy on the same held-out problems every time: a point of the curve."""
        section = self.setup.recipe.rl
        asked = EvalSection(
            problems=section.evaluate_problems,
            max_new_tokens=section.max_new_tokens,
            temperature=1.0,
        )
        with self.flow.idle():
            found = evaluate_policy(self.setup, asked, engine=self.engine)
        check_held_out(found, self.setup.recipe)
        return found.metrics
