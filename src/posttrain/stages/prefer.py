"""The stages ``prefer`` and ``reward``: from a policy to preferences, from those to a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.build.learners import make_reward_learner
from posttrain.build.preference_rows import (
    PAIRS,
    TEST_PAIRS,
    backbone_of,
    reward_rows,
)
from posttrain.build.scoring import close, in_workers, make_scorer, workers_died
from posttrain.build.setup import make_engine, make_template, until_done
from posttrain.config import Resolved, RewardSection
from posttrain.data.preferences import write_preferences
from posttrain.models.load import Policy
from posttrain.models.reward import (
    RewardModel,
    reward_from_policy,
    save_reward,
    with_normalisation,
)
from posttrain.models.scorer import ModelScorer
from posttrain.pipelines import preferences
from posttrain.pipelines.annotate import Annotated, annotate
from posttrain.pipelines.fit import fit, num_steps
from posttrain.pipelines.guard import Guarded
from posttrain.pipelines.preferences import RankedTokens, Verdict
from posttrain.protocols import Scorer, Split
from posttrain.report.plot import plot_calibration
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import collect_scored
from posttrain.runs.files import replacing, write_json
from posttrain.stages.guards import make_guard
from posttrain.stages.prefer_progress import Part, keep, take_up
from posttrain.stages.rl import Context, check_invalid, logged, rendered_prompts
from posttrain.types import Prompt, Rollout, Sampling

CHUNK = 128  # prompts between two signs of life


def prefer_steps(recipe: Resolved, num_prompts: int) -> int:
    """How often the progress of the stage moves."""
    section = recipe.prefer
    return section.repeats * -(-min(num_prompts, section.num_prompts or num_prompts) // CHUNK)


def run_prefer(context: Context) -> dict[str, Any]:
    """Sample completions, let the annotator compare them, and write the preferences."""
    section, task = context.recipe.prefer, context.parts.task
    files: dict[Split, str] = {"train": PAIRS, "test": TEST_PAIRS}
    # Without test prompts, the stage reward holds out some of the others.
    splits = [split for split in files if task is not None and task.prompts(split)]
    judge = _annotator(context, splits)
    work = {split: _questions(context, split) for split in splits}
    ahead = sum(map(len, work.values()))  # parts of the work that are not done
    progress = take_up(context.keeper.begins_at)
    with context.keeper.stepping():  # one for both splits: time counts on from one to the other
        for split in splits:
            part = progress.setdefault(split, Part.new(f"{context.recipe.run.seed} {split}"))
            ahead -= part.done
            left = work[split][part.done :]
            for more, died in _annotated(context, judge, work=left, part=part):
                part.add(more)
                ahead -= 1
                if split == "train":
                    context.tracker.log(part.done, _counts(part.found) | died)
                done = sum(known.done for known in progress.values())
                context.keeper.stepped(done, last=ahead == 0, more=lambda to: keep(progress, to))
            if not part.found.sets:
                raise ValueError(
                    f"prefer: the {split} prompts gave no preference: all comparisons were ties. "
                    "The policy answers the same every time, or the rewards cannot tell answers "
                    "apart; raise prefer.temperature or prefer.samples, or look at the rewards"
                )
    record: dict[str, Any] = {}
    for split in splits:
        found = progress[split].found
        with replacing(context.folder.path / files[split]) as beside:
            write_preferences(beside, found.sets)
        record[split] = {**vars(found), "sets": len(found.sets)}
    return {**record, "error_rate": section.error_rate}


def _counts(found: Annotated) -> dict[str, float]:
    return {
        "prefer/sets": float(len(found.sets)),
        "prefer/ties": float(found.ties),
        "prefer/errors": float(found.errors),
        "prefer/broken": float(found.broken),
    }


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prompts that are asked together, and what decides their answers."""

    prompts: Sequence[Prompt]
    seed: int


def _questions(context: Context, split: Split) -> list[Questions]:
    """The prompts of a split, some at a time, as often as the section asks."""
    section = context.recipe.prefer
    prompts = rendered_prompts(
        context.parts,
        context.policy,
        split=split,
        max_new_tokens=section.max_new_tokens,
        limit=section.num_prompts if split == "train" else None,
    )
    seed = context.recipe.run.seed * 1_000_003 + (500_000 if split == "test" else 0)
    return [
        Questions(prompts=prompts[start : start + CHUNK], seed=seed + repeat * len(prompts) + start)
        for repeat in range(section.repeats)
        for start in range(0, len(prompts), CHUNK)
    ]


def _annotator(context: Context, splits: Sequence[Split]) -> RewardScorer:
    """What tells completions apart; every prompt has the columns that it wants."""
    parts, section = context.parts, context.recipe.prefer
    assert parts.task is not None, "the rules want a task"
    judge = make_scorer(section.rewards or parts.task.rewards, parts.template, device=parts.device)
    for prompt in (prompt for split in splits for prompt in parts.task.prompts(split)):
        judge.check_columns(prompt)
    return judge


def _annotated(
    context: Context, judge: RewardScorer, *, work: Sequence[Questions], part: Part
) -> Iterator[tuple[Annotated, dict[str, float]]]:
    section = context.recipe.prefer
    scorer = in_workers(judge, context.recipe.grading)
    try:
        for rollouts in _compared(context, work, scorer=scorer):
            check_invalid(rollouts, section.max_invalid)
            found = Annotated()
            for _, group in itertools.groupby(rollouts, key=lambda rollout: rollout.group):
                found += annotate(
                    list(group),
                    error_rate=section.error_rate,
                    min_gap=section.min_gap,
                    ranked=section.ranked,
                    generator=part.generator,
                )
            yield found, workers_died(scorer, "prefer/workers_died")
    finally:
        close(scorer)


def _compared(
    context: Context, work: Sequence[Questions], *, scorer: Scorer
) -> Iterator[list[Rollout]]:
    """Scored completions, one list for each part of the work."""
    recipe, section = context.recipe, context.recipe.prefer
    rl = recipe.for_evaluations
    engine = make_engine(
        None if rl is None else rl.engine,
        context.policy,
        template=context.parts.template,
        compute=recipe.model.compute,
    )
    sampling = Sampling(max_new_tokens=section.max_new_tokens, temperature=section.temperature)
    with until_done(engine):
        for questions in work:
            found = collect_scored(
                questions.prompts,
                sampling,
                engine=engine,
                scorer=scorer,
                num_samples=section.samples,
                seed=questions.seed,
            )
            yield list(found.rollouts)


@dataclass(frozen=True, kw_only=True)
class RewardJob:
    """A reward model that is yet to learn, and the preferences to learn and to be judged by."""

    reward: RewardModel
    train: Sequence[RankedTokens]
    test: Sequence[RankedTokens]

    def num_steps(self, section: RewardSection) -> int:
        """Optimiser steps of the stage."""
        return num_steps(len(self.train), section.batch_size, epochs=section.epochs)


def prepare_reward(recipe: Resolved, policy: Policy, *, device: str, prefer: Path) -> RewardJob:
    """The backbone with a new head, and the preferences in its tokens; ``prefer`` is that stage's.

    Everything that can be wrong with data or model is found here, before a step is taken.
    """
    backbone = backbone_of(recipe, policy, device=device)
    template = make_template(recipe, backbone)
    train, test = reward_rows(recipe, backbone, template=template, prefer=prefer)
    made = reward_from_policy(backbone, seed=recipe.run.seed)
    reward = replace(made, chat=bool(template.chat))
    return RewardJob(reward=reward, train=train, test=test)


def run_reward(context: Context, job: RewardJob) -> dict[str, Any]:
    """Train the reward model, judge it on what it has not seen, normalise and save it."""
    recipe, section = context.recipe, context.recipe.reward
    total_steps = job.num_steps(section)
    learner = make_reward_learner(
        recipe,
        job.reward,
        section=section,
        device=context.parts.device,
        total_steps=total_steps,
    )
    context.keeper.restore(learner)
    guard = make_guard(section, context.folder.path, decode=job.reward.tokenizer.decode)
    on_step = logged(
        context,
        learner,
        guard=context.keeper.keep(guard),
        every=section.save_every,
        total_steps=total_steps,
    )
    batches = preferences.batches(
        job.train,
        section.batch_size,
        epochs=section.epochs,
        pad_token=job.reward.pad_token,
        seed=recipe.run.seed,
        start=context.keeper.step,
    )
    with context.keeper.stepping():
        fit(
            batches,
            Guarded(learner, guard),
            objective=preferences.preference,
            on_step=on_step,
            start=context.keeper.step,
        )
    verdict = _judge(job, learner.micro_batch_tokens)
    save_reward(with_normalisation(job.reward, verdict.scores), context.folder.model)
    found = _numbers(verdict)
    write_json(context.folder.path / "verdict.json", found)
    title = f"{verdict.num_pairs:,} held-out pairs, {verdict.accuracy:.1%} right"
    plot_calibration(verdict.bins, context.folder.path / "calibration.png", title=title)
    return {"train_sets": len(job.train), "test_sets": len(job.test), "verdict": found}


def _judge(job: RewardJob, micro_batch_tokens: int) -> Verdict:
    scorer = ModelScorer(
        lambda: job.reward,
        render=lambda reward, rollout: (),
        micro_batch_tokens=micro_batch_tokens,
    )
    scores = iter(scorer.raw([row for ranked in job.test for row in ranked.rows]))
    grouped = [[next(scores) for _ in ranked.rows] for ranked in job.test]
    return preferences.judge(job.test, grouped)


def _numbers(verdict: Verdict) -> dict[str, Any]:
    return {
        "accuracy": verdict.accuracy,
        "loss": verdict.loss,
        "margin": verdict.margin,
        "calibration_error": verdict.calibration_error,
        "length_correlation": verdict.length_correlation,
        "num_pairs": verdict.num_pairs,
        "calibration": [vars(found) for found in verdict.bins],
    }
