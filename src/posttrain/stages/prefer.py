"""The stage ``prefer``: completions of the policy, and which of them an annotator prefers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.build.preference_rows import PAIRS, TEST_PAIRS
from posttrain.build.rendered_prompts import rendered_prompts
from posttrain.build.sampler import make_plain_sampler, until_done
from posttrain.build.scoring import check_invalid, close, in_workers, make_scorer, workers_died
from posttrain.build.setup import Setup
from posttrain.data.preference_sets import Ranked, write_preferences
from posttrain.pipelines.annotate import Annotated, annotate
from posttrain.protocols import Scorer, Split
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import collect_scored
from posttrain.runs.checkpoints import Checkpoint
from posttrain.runs.files import read_json, replacing
from posttrain.stages.job import Job
from posttrain.stages.open_stage import OpenStage
from posttrain.types import Prompt, Rollout, Sampling, draw_seed

ANNOTATED = "annotated.json"
CHUNK = 128  # prompts between two signs of life


@dataclass(kw_only=True)
class SplitProgress:
    """What is done of one split: the preferences, and the draws of the annotator's errors."""

    generator: random.Random
    done: int = 0
    found: Annotated = field(default_factory=Annotated)

    @classmethod
    def new(cls, seed: str) -> SplitProgress:
        """Nothing is done yet."""
        return cls(generator=random.Random(seed))

    def add(self, more: Annotated) -> None:
        """One more part of the work is done."""
        self.done, self.found = self.done + 1, self.found + more

    def plain(self) -> dict[str, Any]:
        """The same in JSON."""
        found = {**vars(self.found), "sets": list(map(_plain, self.found.sets))}
        return {"done": self.done, "found": found, "generator": self.generator.getstate()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> SplitProgress:
        """What :meth:`plain` gave."""
        version, numbers, spare = plain["generator"]
        generator = random.Random()
        generator.setstate((version, tuple(numbers), spare))
        sets = [_ranked(row) for row in plain["found"]["sets"]]
        found = Annotated(**{**plain["found"], "sets": sets})
        return cls(generator=generator, done=plain["done"], found=found)


def run_prefer(setup: Setup, job: Job) -> dict[str, Any]:
    """Sample completions, let the annotator compare them, and write the preferences."""
    section, task = setup.recipe.prefer, setup.task
    prompts = len(task.prompts("train")) if task is not None else 0
    chunks = -(-min(prompts, section.num_prompts or prompts) // CHUNK)
    with job.stage("prefer", total_steps=section.repeats * chunks) as stage:
        return _annotate(setup, stage)


def _annotate(setup: Setup, stage: OpenStage) -> dict[str, Any]:
    section, task, keeper = setup.recipe.prefer, setup.task, stage.keeper
    files: dict[Split, str] = {"train": PAIRS, "test": TEST_PAIRS}
    # Without test prompts, the stage reward holds out some of the others.
    splits = [split for split in files if task is not None and task.prompts(split)]
    judge = _annotator(setup, splits)
    work = {split: _questions(setup, split) for split in splits}
    ahead = sum(map(len, work.values()))  # parts of the work that are not done
    progress = restore(keeper.begins_at)
    with keeper.stepping():  # one for both splits: time counts on from one to the other
        for split in splits:
            part = progress.setdefault(split, SplitProgress.new(f"{setup.recipe.run.seed} {split}"))
            ahead -= part.done
            left = work[split][part.done :]
            for more, died in _annotated(setup, judge, work=left, part=part):
                part.add(more)
                ahead -= 1
                if split == "train":
                    stage.tracker.log(part.done, _counts(part.found) | died)
                done = sum(known.done for known in progress.values())
                keeper.stepped(done, last=ahead == 0, more=lambda to: keep(progress, to))
            if not part.found.sets:
                raise ValueError(
                    f"prefer: the {split} prompts gave no preference: all comparisons were ties. "
                    "The policy answers the same every time, or the rewards cannot tell answers "
                    "apart; raise prefer.temperature or prefer.samples, or look at the rewards"
                )
    told: dict[str, Any] = {}
    for split in splits:
        found = progress[split].found
        with replacing(stage.folder.path / files[split]) as beside:
            write_preferences(beside, found.sets)
        told[split] = {**vars(found), "sets": len(found.sets)}
    return {**told, "error_rate": section.error_rate}


def _counts(found: Annotated) -> dict[str, float]:
    return {
        "prefer/sets": float(len(found.sets)),
        "prefer/ties": float(found.ties),
        "prefer/errors": float(found.errors),
        "prefer/broken": float(found.broken),
    }


@dataclass(frozen=True)
class PromptChunk:
    """Prompts that are asked together, and what decides their answers."""

    prompts: Sequence[Prompt]
    seed: int


def _questions(setup: Setup, split: Split) -> list[PromptChunk]:
    """The prompts of a split, some at a time, as often as the section asks."""
    section = setup.recipe.prefer
    limit = section.num_prompts if split == "train" else None
    longest = section.max_new_tokens
    prompts = rendered_prompts(setup, split, max_new_tokens=longest, limit=limit)
    seed = draw_seed(setup.recipe.run.seed, 500_000 if split == "test" else 0)
    return [
        PromptChunk(
            prompts=prompts[start : start + CHUNK], seed=seed + repeat * len(prompts) + start
        )
        for repeat in range(section.repeats)
        for start in range(0, len(prompts), CHUNK)
    ]


def _annotator(setup: Setup, splits: Sequence[Split]) -> RewardScorer:
    """What tells completions apart; every prompt has the columns that it wants."""
    task, section = setup.task, setup.recipe.prefer
    assert task is not None, "the rules want a task"
    judge = setup.handed_rewards
    if judge is None or section.rewards:
        specs = section.rewards or task.rewards
        named = make_scorer(specs, setup.template, device=setup.device)
        judge = named if judge is None else judge.joined(named)
    for prompt in (prompt for split in splits for prompt in task.prompts(split)):
        judge.check_columns(prompt)
    return judge


def _annotated(
    setup: Setup, judge: RewardScorer, *, work: Sequence[PromptChunk], part: SplitProgress
) -> Iterator[tuple[Annotated, dict[str, float]]]:
    section = setup.recipe.prefer
    scorer = in_workers(judge, setup.recipe.grading)
    try:
        for rollouts in _compared(setup, work, scorer=scorer):
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
    setup: Setup, work: Sequence[PromptChunk], *, scorer: Scorer
) -> Iterator[list[Rollout]]:
    """Scored completions, one list for each part of the work."""
    section, engine = setup.recipe.prefer, make_plain_sampler(setup)
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


def keep(progress: Mapping[Split, SplitProgress], folder: Path) -> dict[str, Any]:
    """Write what is done into a checkpoint."""
    plain = {split: part.plain() for split, part in progress.items()}
    # In ASCII: a completion may hold half a character, which UTF-8 cannot.
    (folder / ANNOTATED).write_text(json.dumps(plain), encoding="ascii")
    return {}


def restore(begins_at: Checkpoint | None) -> dict[Split, SplitProgress]:
    """What was done when a checkpoint was written; nothing without one."""
    if begins_at is None:
        return {}
    return {
        split: SplitProgress.read(part)
        for split, part in read_json(begins_at.path / ANNOTATED).items()
    }


def _plain(ranked: Ranked) -> dict[str, Any]:
    return {**vars(ranked), "messages": [dict(message) for message in ranked.messages]}


def _ranked(row: Mapping[str, Any]) -> Ranked:
    return Ranked(
        prompt=row["prompt"],
        messages=tuple(row["messages"]),
        completions=tuple(row["completions"]),
        margin=row["margin"],
        ended=tuple(row.get("ended", ())),
    )
