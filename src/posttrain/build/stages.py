"""The stages rl and eval: each takes a policy, does one job, and fills its folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.build.guards import make_guard
from posttrain.build.keeper import Keeper, More, go_on, rl_state
from posttrain.build.learners import make_audit, make_learner, make_plan
from posttrain.build.neighbours import Neighbours
from posttrain.build.overlap import Flow, flowing, make_sampler
from posttrain.build.parts import (
    Parts,
    choose_compile,
    make_engine,
    make_sampling,
    render_prompts,
    until_done,
)
from posttrain.build.resume import check_steps
from posttrain.build.scoring import workers_died
from posttrain.build.ways import Ways, tell_ways
from posttrain.config import EvalSection, Resolved
from posttrain.config.piece_facts import wants_greedy
from posttrain.models.load import Policy
from posttrain.pipelines import rl as rl_pipeline
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.clock import Clock
from posttrain.pipelines.evaluate import Evaluation, evaluate
from posttrain.pipelines.fit import Fitted
from posttrain.pipelines.guard import Guard, Guarded
from posttrain.protocols import Engine, Learner, Scorer, Split, Task, Tracker
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.source import PromptCycle, RolloutSource
from posttrain.runs import RolloutWriter, StageFolder, sequence_advantages
from posttrain.runs.rollouts import rollout_writer
from posttrain.track.progress import phase
from posttrain.track.text import printable
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a stage works with: recipe, policy, the shared parts, its folder, tracker, checkpoints.

    ``reward_model`` is where the stage reward of this run leaves its model.
    """

    recipe: Resolved
    policy: Policy
    parts: Parts
    folder: StageFolder
    tracker: Tracker
    keeper: Keeper
    reward_model: Path | None = None


def logged(
    context: Context,
    learner: Learner,
    *,
    guard: Guard,
    every: int | None,
    total_steps: int,
    measured: Callable[[Fitted], Mapping[str, float]] = lambda fitted: {},
    more: More | None = None,
) -> Callable[[Fitted], None]:
    """What follows a step of supervised training: its record, and a checkpoint where one is due."""

    def on_step(fitted: Fitted) -> None:
        step, skipped = fitted.step, {"train/skipped_total": float(guard.total)}
        context.tracker.log(step, {**fitted.metrics(), **skipped, **measured(fitted)})
        last = step == total_steps
        context.keeper.stepped(step, learner=learner, every=every, last=last, more=more)
        guard.check()

    return on_step


def run_rl(context: Context, *, engine: Engine | None = None) -> None:
    """Reinforcement learning; an engine that is handed over stays open behind it."""
    sampler = make_sampler(context.recipe, context.policy, parts=context.parts, engine=engine)
    with until_done(sampler, given=engine):
        _learn(context, sampler)


def _learn(context: Context, engine: Engine) -> None:
    recipe, policy, parts = context.recipe, context.policy, context.parts
    section = recipe.rl
    prompts = rendered_prompts(parts, policy, split="train", max_new_tokens=section.max_new_tokens)
    total = section.steps * section.epochs * section.minibatches
    learner = make_learner(
        recipe,
        policy,
        section=section,
        device=parts.device,
        total_steps=total,
        reward_model=context.reward_model,
    )
    sync = engine.sync(learner)
    longest = section.max_new_tokens + max((len(p.tokens) for p in prompts), default=0)
    ways = tell_ways(context, learner, longest=longest, engine=engine)
    plan = make_plan(section)
    source = _source(context, engine, prompts=prompts)
    keeper, device, decode = context.keeper, policy.model.device, parts.template.decode
    check_steps(section.steps, done=keeper.step)
    state, waiting = go_on(
        keeper, learner, source=source, prompts=prompts, sync=sync, max_lag=section.max_lag
    )
    if section.max_lag:
        _ = learner.micro_batch_tokens  # found out before another thread takes memory meanwhile
    remaining = source.steps(section.steps - keeper.step - len(waiting))
    batches = _checked(remaining, section.max_invalid)
    flow_of = flowing(batches, sync, max_lag=section.max_lag, device=device, waiting=waiting)
    guard, clock = keeper.keep(make_guard(section, context.folder.path, decode=decode)), Clock()
    with keeper.stepping(), flow_of as flow, rollout_writer(context.folder.rollouts) as writer:
        watch = _Watch(
            context,
            flow,
            engine=engine,
            learner=learner,
            prompts=prompts,
            writer=writer,
            audit=make_audit(recipe, section, plan=plan, device=parts.device),
            guard=guard,
            clock=clock,
            ways=ways,
        )
        if section.evaluate_every and not keeper.step:
            context.tracker.log(0, watch.evaluate())
        rl_pipeline.train(
            clock.source(_told(flow.batches, recipe, device=parts.device)),
            Guarded(learner, guard),
            plan=plan,
            sync=clock.sync(flow.sync),
            pad_token=policy.pad_token,
            seed=recipe.run.seed,
            on_step=watch.on_step,
            state=state,
        )
    with phase("saving the model"):
        learner.save(context.folder.model)


def _source(context: Context, engine: Engine, *, prompts: Sequence[Prompt]) -> RolloutSource:
    """Where the rollouts of the RL stage come from."""
    section, seed = context.recipe.rl, context.recipe.run.seed
    _, scorer = _graded(context.parts)
    return RolloutSource(
        engine,
        scorer,
        prompts=PromptCycle(prompts, seed=seed),
        sampling=make_sampling(section),
        prompts_per_step=section.prompts_per_step,
        group_size=section.group_size,
        seed=seed,
        max_resamples=section.max_resamples if section.dynamic_sampling else 0,
        greedy=wants_greedy(section),
        env=context.parts.env,
        encode=context.parts.template.encode_reply,
    )


class _Watch:
    """What happens after every RL step: numbers, rollouts, evaluations, checkpoints."""

    def __init__(
        self,
        context: Context,
        flow: Flow,
        *,
        engine: Engine,
        learner: Learner,
        prompts: Sequence[Prompt],
        writer: RolloutWriter,
        audit: Audit | None,
        guard: Guard,
        clock: Clock,
        ways: Ways,
    ) -> None:
        self._context = context
        self._audit, self._guard, self._clock = audit, guard, clock
        self._flow = flow
        self._section = context.recipe.rl
        self._engine = engine
        self._learner = learner
        self._prompts = prompts
        self._writer = writer
        self._ways = ways
        self._neighbours = Neighbours()

    def on_step(self, taken: rl_pipeline.Step) -> None:
        """Record a finished step, and stop the run where audit or guard say so."""
        if self._audit is not None:
            self._audit.check(taken)
        step, rollouts = taken.state.step, taken.collected.rollouts
        metrics = {**taken.metrics(), "train/skipped_total": float(self._guard.total)}
        metrics |= self._clock.seconds()
        metrics["time/step"] = metrics["time/wait"] + metrics["time/train"]
        waited = self._neighbours.waited()
        if waited is not None:
            metrics["time/core_wait"] = waited
        remark = self._neighbours.remark(metrics["time/step"] / max(1, metrics["rollout/tokens"]))
        if remark:
            self._context.keeper.tell(remark)
        self._ways.look()
        self._writer.write(rollouts, step=step, advantages=sequence_advantages(taken.batch))
        every = self._section.evaluate_every
        if every and (step % every == 0 or step == self._section.steps):
            metrics |= self.evaluate()
        metrics |= workers_died(self._context.parts.scorer, "reward/workers_died")
        self._context.tracker.log(step, metrics)
        # What run.keep_best goes by: the accuracy, where something checks answers.
        accuracy = metrics.get("eval/accuracy" if self._context.parts.correct_by else "eval/reward")
        more = rl_state(
            taken,
            self._flow.waiting(),
            prompts=self._prompts,
            max_lag=self._section.max_lag,
            accuracy=accuracy,
        )
        self._context.keeper.stepped(
            step,
            learner=self._learner,
            every=self._section.save_every,
            last=step == self._section.steps,
            more=lambda place: self._on_disk(more(place)),
        )
        self._guard.check()

    def _on_disk(self, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        self._writer.wait()  # a checkpoint never knows more than the disk
        return numbers

    def evaluate(self) -> dict[str, float]:
        """Accuracy on the same held-out problems every time: a point of the curve."""
        context, section = self._context, self._section
        asked = EvalSection(
            problems=section.evaluate_problems,
            max_new_tokens=section.max_new_tokens,
            temperature=1.0,
        )
        with self._flow.idle():
            found = run_eval(context, asked, engine=self._engine)
        check_held_out(found, context.recipe)
        return found.metrics


def run_eval(
    context: Context,
    section: EvalSection,
    *,
    engine: Engine | None = None,
    doing: str = "evaluating",
) -> Evaluation:
    """Accuracy of a stage's policy on held-out problems."""
    return evaluate_policy(
        context.recipe,
        context.policy,
        parts=context.parts,
        section=section,
        engine=engine,
        doing=doing,
    )


def evaluate_policy(
    recipe: Resolved,
    policy: Policy,
    *,
    parts: Parts,
    section: EvalSection,
    engine: Engine | None = None,
    doing: str = "evaluating",
) -> Evaluation:
    """Accuracy of a policy on the task's test problems; ``doing`` is what a display calls it."""
    _, scorer = _graded(parts)
    rl = recipe.for_evaluations
    sampler = engine or make_engine(
        None if rl is None else rl.engine,
        policy,
        template=parts.template,
        compute=recipe.model.compute,
    )
    prompts = rendered_prompts(
        parts,
        policy,
        split="test",
        max_new_tokens=section.max_new_tokens,
        limit=section.problems,
    )
    num_answers = len(prompts) * (1 + section.samples)
    with until_done(sampler, given=engine), phase(doing, total=num_answers, unit="answers"):
        return evaluate(
            partial(
                collect_scored,
                engine=sampler,
                scorer=scorer,
                env=parts.env,
                encode=parts.template.encode_reply,
            ),
            prompts,
            marks=parts.marks,
            sampling=Sampling(
                max_new_tokens=section.max_new_tokens,
                temperature=section.temperature,
                stop=rl.stop if rl is not None else (),
            ),
            samples=section.samples,
            seed=recipe.run.seed,
        )


def _told(batches: Iterable[Collected], recipe: Resolved, *, device: str) -> Iterator[Collected]:
    """The same rollouts; who waits for them, or for what is learned from them, reads so."""
    section = recipe.rl
    # Sampling in another thread is not counted: what is waited for is a batch, not a completion.
    total = None if section.max_lag else section.prompts_per_step * section.group_size
    compiling = ", compiling the model first" if choose_compile(recipe, device) else ""
    doing, source, begun = f"the first rollouts{compiling}", iter(batches), False
    while True:
        with phase(doing, total=total, unit="completions", routine=begun):
            collected = next(source, None)
        if collected is None:
            return
        with phase("learning", routine=begun):
            yield collected
        doing, begun = "sampling and grading", True


def _checked(source: Iterator[Collected], max_invalid: float) -> Iterator[Collected]:
    """The same rollouts; a batch with too many broken scores stops the run before it is learned."""
    for collected in source:
        check_invalid(collected.rollouts, max_invalid)
        greedy = {r.group: r.greedy for r in collected.rollouts if r.greedy is not None}
        check_invalid(list(greedy.values()), max_invalid, of=" of greedy completions")
        yield collected


def check_held_out(found: Evaluation, recipe: Resolved) -> None:
    """Stop a run whose graders break on held-out problems, as :func:`check_invalid` on others.

    In the accuracy a broken score is not a right one: too many would pass for a bad model. A run
    without ``[rl]`` has no limit, and shows the share.
    """
    rl = recipe.for_evaluations
    if rl is not None:
        check_invalid(found.rollouts, rl.max_invalid, of=" of held-out problems")


def check_invalid(rollouts: Sequence[Rollout], max_invalid: float, *, of: str = "") -> None:
    """Stop the run when too many graders broke, with what the first one said."""
    broken = [r for r in rollouts if r.score is not None and not r.score.ok]
    if len(broken) <= max_invalid * len(rollouts):
        return
    first = broken[0]
    score = first.score or Score(value=0.0)
    shown = [f"prompt {first.prompt.id!r}: {printable(first.prompt.text, limit=200)}"]
    shown.append(f"completion: {printable(first.text, limit=400)}")
    shown += [printable(line, limit=200) for line in score.details.splitlines()]
    raise RuntimeError(
        f"rewards: {len(broken)} of {len(rollouts)} scores{of} are broken, more than max_invalid "
        f"= {max_invalid:g}. The first, on prompt {first.prompt.id!r}: {score.reason}. "
        "Fix the reward; `posttrain` never counts a broken grader as a wrong answer\n  "
        + "\n  ".join(shown)
    )


def _graded(parts: Parts) -> tuple[Task, Scorer]:
    if parts.task is None or parts.scorer is None:
        raise ValueError("task: this stage needs a task with rewards; name one in [task]")
    return parts.task, parts.scorer


def rendered_prompts(
    parts: Parts,
    policy: Policy,
    *,
    split: Split,
    max_new_tokens: int,
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts of a split with their tokens; what was left out is said, not hidden."""
    if parts.task is None:
        raise ValueError("task: this stage needs prompts; name a task in [task]")
    prompts, num_dropped = render_prompts(
        parts.task.prompts(split)[:limit],
        parts.template,
        policy=policy,
        max_new_tokens=max_new_tokens,
    )
    if num_dropped:
        warnings.warn(
            f"{num_dropped} of {num_dropped + len(prompts)} {split} prompts leave no room for "
            f"{max_new_tokens} new tokens in the model's context and are left out",
            stacklevel=3,
        )
    return prompts
