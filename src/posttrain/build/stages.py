"""The stages of a run: each takes a policy, does one job, and fills its folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build.guards import make_guard
from posttrain.build.learners import make_audit, make_learner, make_plan
from posttrain.build.overlap import Flow, flowing, make_sampler
from posttrain.build.parts import Parts, filled, make_engine, make_sampling, render_prompts
from posttrain.config import EvalSection, Recipe, RlSection, SftSection
from posttrain.data.sources import read_demonstrations
from posttrain.models.load import Policy
from posttrain.pipelines import rl as rl_pipeline
from posttrain.pipelines import supervised
from posttrain.pipelines.evaluate import Evaluation, evaluate
from posttrain.protocols import Engine, Scorer, Split, Task, Tracker
from posttrain.rollout.source import PromptCycle, RolloutSource
from posttrain.runs import RolloutWriter, StageFolder, sequence_advantages
from posttrain.tasks import demonstrations
from posttrain.track.text import printable
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a stage works with: recipe, policy, the shared parts, its folder, its tracker.

    ``reward_model`` is where the stage reward of this run leaves its model.
    """

    recipe: Recipe
    policy: Policy
    parts: Parts
    folder: StageFolder
    tracker: Tracker
    reward_model: Path | None = None


def sft_rows(recipe: Recipe, policy: Policy, *, parts: Parts) -> list[supervised.Row]:
    """The demonstrations as tokens, with True where the completion is."""
    section = filled(recipe.sft)
    rows = _demonstrations(section, parts.task, seed=recipe.run.seed)
    end = policy.end_tokens[0]
    template = parts.template
    tokens: list[supervised.Row] = []
    for number, row in enumerate(rows):
        if "messages" in row:
            tokens.append(template.render_conversation(row["messages"]))
            continue
        prompt = template.render(Prompt(id=f"demonstration-{number}", text=row["prompt"])).tokens
        completion = template.encode_completion(row["completion"], end)
        chosen = (False,) * len(prompt) + (True,) * len(completion)
        tokens.append(((*prompt, *completion), chosen))
    return tokens


def _demonstrations(section: SftSection, task: Task | None, *, seed: int) -> list[dict[str, Any]]:
    if section.data == "task":
        if task is None:
            raise ValueError('sft.data: "task" needs a task; name one, or give a JSONL file')
        wrong, count = section.wrong_share, section.num_demonstrations
        return list(demonstrations(task, num=count, wrong_share=wrong, seed=seed))
    return read_demonstrations(section.data)[: section.num_demonstrations]


def sft_steps(recipe: Recipe, num_rows: int) -> int:
    """Optimiser steps of the SFT stage."""
    section = filled(recipe.sft)
    return supervised.num_steps(num_rows, section.batch_size, epochs=section.epochs)


def run_sft(context: Context, rows: Sequence[supervised.Row]) -> None:
    """Supervised fine-tuning."""
    recipe, policy = context.recipe, context.policy
    section = filled(recipe.sft)
    learner = make_learner(
        recipe,
        policy,
        section=section,
        device=context.parts.device,
        total_steps=sft_steps(recipe, len(rows)),
    )
    supervised.train(
        rows,
        learner,
        epochs=section.epochs,
        batch_size=section.batch_size,
        pad_token=policy.pad_token,
        seed=recipe.run.seed,
        on_step=context.tracker.log,
        guard=make_guard(section, context.folder.path, decode=context.parts.template.decode),
    )
    learner.save(context.folder.model)


def run_rl(context: Context, *, engine: Engine | None = None) -> None:
    """Reinforcement learning."""
    recipe, policy, parts = context.recipe, context.policy, context.parts
    section = filled(recipe.rl)
    _, scorer = _graded(parts)
    engine, sync = make_sampler(recipe, policy, parts=parts, engine=engine)
    sampling = make_sampling(section)
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
    plan = make_plan(section)
    source = RolloutSource(
        engine,
        scorer,
        prompts=PromptCycle(prompts, seed=recipe.run.seed),
        sampling=sampling,
        prompts_per_step=section.prompts_per_step,
        group_size=section.group_size,
        seed=recipe.run.seed,
        max_resamples=section.max_resamples or 0,
    )
    batches = _checked(source.steps(section.steps), section.max_invalid)
    device = policy.model.device
    with (
        flowing(batches, sync, max_lag=section.max_lag, device=device) as flow,
        RolloutWriter(context.folder.rollouts) as writer,
    ):
        watch = _Watch(
            context, flow, section=section, engine=engine, save=learner.save, writer=writer
        )
        if section.evaluate_every:
            context.tracker.log(0, watch.evaluate())
        rl_pipeline.train(
            flow.batches,
            learner,
            plan=plan,
            sync=flow.sync,
            pad_token=policy.pad_token,
            seed=recipe.run.seed,
            on_step=watch.on_step,
            audit=make_audit(recipe, section, plan=plan, device=parts.device),
            guard=make_guard(section, context.folder.path, decode=parts.template.decode),
        )
    learner.save(context.folder.model)


class _Watch:
    """What happens after every RL step: numbers, rollouts, evaluations, checkpoints."""

    def __init__(
        self,
        context: Context,
        flow: Flow,
        *,
        section: RlSection,
        engine: Engine,
        save: Callable[[Path], None],
        writer: RolloutWriter,
    ) -> None:
        self._context = context
        self._flow = flow
        self._section = section
        self._engine = engine
        self._save = save
        self._writer = writer

    def on_step(self, report: rl_pipeline.Report) -> None:
        """Record a finished step."""
        step, metrics = report.state.step, dict(report.metrics)
        rollouts = report.collected.rollouts
        folder = self._context.folder
        metrics["time/step"] = metrics["time/wait"] + metrics["time/train"]
        self._writer.write(rollouts, step=step, advantages=sequence_advantages(report.batch))
        every = self._section.evaluate_every
        if every and (step % every == 0 or step == self._section.steps):
            metrics |= self.evaluate()
        self._context.tracker.log(step, metrics)
        if self._section.save_every and step % self._section.save_every == 0:
            self._writer.wait()  # a checkpoint never knows more than the disk
            self._save(folder.checkpoint(step))

    def evaluate(self) -> dict[str, float]:
        """Accuracy on the same held-out problems every time: a point of the curve."""
        context, section = self._context, self._section
        assert section.evaluate_problems, "resolve fills it where there are evaluations"
        asked = EvalSection(
            problems=section.evaluate_problems, max_new_tokens=section.max_new_tokens
        )
        with self._flow.idle():
            found = run_eval(context, asked, engine=self._engine)
        return {"eval/accuracy": found.accuracy.value, "eval/reward": found.mean_reward}


def run_eval(context: Context, section: EvalSection, *, engine: Engine | None = None) -> Evaluation:
    """Accuracy of a stage's policy on held-out problems."""
    return evaluate_policy(
        context.recipe, context.policy, parts=context.parts, section=section, engine=engine
    )


def evaluate_policy(
    recipe: Recipe,
    policy: Policy,
    *,
    parts: Parts,
    section: EvalSection,
    engine: Engine | None = None,
) -> Evaluation:
    """Accuracy of a policy on the task's test problems."""
    _, scorer = _graded(parts)
    spec = recipe.rl.engine if recipe.rl is not None and recipe.rl.engine else "native"
    engine = engine or make_engine(
        spec, policy, template=parts.template, compute=recipe.model.compute
    )
    prompts = rendered_prompts(
        parts,
        policy,
        split="test",
        max_new_tokens=section.max_new_tokens,
        limit=section.problems,
    )
    return evaluate(
        engine,
        prompts,
        scorer=scorer,
        correct_by=parts.correct_by,
        sampling=Sampling(
            max_new_tokens=section.max_new_tokens, temperature=section.temperature or 1.0
        ),
        samples=section.samples,
        seed=recipe.run.seed,
    )


def _checked(source: Iterator[Collected], max_invalid: float) -> Iterator[Collected]:
    """The same rollouts; a batch with too many broken scores stops the run before it is learned."""
    for collected in source:
        check_invalid(collected.rollouts, max_invalid)
        yield collected


def check_invalid(rollouts: Sequence[Rollout], max_invalid: float) -> None:
    """Stop the run when too many graders broke, with what the first one said."""
    broken = [r for r in rollouts if r.score is not None and not r.score.ok]
    if len(broken) <= max_invalid * len(rollouts):
        return
    first = broken[0]
    score = first.score or Score(value=0.0)
    shown = [f"prompt {first.prompt.id!r}: {printable(first.prompt.text, limit=200)}"]
    shown.append(f"completion: {printable(first.completion.text, limit=400)}")
    shown += [printable(line, limit=200) for line in score.details.splitlines()]
    raise RuntimeError(
        f"rewards: {len(broken)} of {len(rollouts)} scores are broken, more than max_invalid = "
        f"{max_invalid:g}. The first, on prompt {first.prompt.id!r}: {score.reason}. "
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
