"""A whole run: the stages of a recipe in order, into one folder that can be looked at and kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from posttrain.build.check import before_rl
from posttrain.build.diagnosis import diagnosed
from posttrain.build.fingerprint import fingerprints, function_text
from posttrain.build.parts import (
    Parts,
    choose_device,
    choose_threads,
    filled,
    make_parts,
    make_policy,
)
from posttrain.build.preference_stages import (
    check_early,
    prefer_steps,
    prepare_reward,
    run_prefer,
    run_reward,
)
from posttrain.build.results import Run, finish_run, write_evaluation
from posttrain.build.stages import Context, run_eval, run_rl, run_sft, sft_rows, sft_steps
from posttrain.config import Recipe, cautions, resolve, to_dict
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Task, Tracker
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import RunFolder, config_digest
from posttrain.track import TRACKERS, Several
from posttrain.track import Stage as TrackedStage

TITLES = {
    "sft": "Supervised fine-tuning",
    "prefer": "Preferences",
    "reward": "Reward model",
    "rl": "Reinforcement learning",
    "eval": "Evaluation",
}


@dataclass(frozen=True, kw_only=True)
class Supplied:
    """Parts handed over as Python objects instead of by name."""

    task: Task | None = None
    rewards: RewardScorer | None = None
    engine: Engine | None = None

    def names(self) -> set[Any]:
        """Which they are."""
        given = {"task": self.task, "rewards": self.rewards, "engine": self.engine}
        return {name for name, part in given.items() if part is not None}

    def config(self) -> dict[str, Any]:
        """What the run folder remembers of them, so that another reward is another run."""
        known: dict[str, str] = {}
        if self.task is not None:
            prompts = [*self.task.prompts("train"), *self.task.prompts("test")]
            known["task"] = config_digest(repr(prompts))
        if self.rewards is not None:
            sources = [
                (reward.name, reward.weight, function_text(reward.function))
                for reward in self.rewards.rewards
            ]
            known["rewards"] = config_digest(repr(sources))
        if self.engine is not None:
            known["engine"] = type(self.engine).__name__
        return {"supplied": known} if known else {}


def run(
    recipe: Recipe,
    supplied: Supplied | None = None,
    *,
    text: str | None = None,
    console: Console | None = None,
) -> Run:
    """Run every stage of a recipe that is not finished yet, and return what came out.

    ``text`` is the recipe as the user wrote it, kept in the folder. A quiet ``console`` silences
    the live display too.
    """
    started = time.monotonic()
    supplied, console = supplied or Supplied(), console or Console()
    recipe = resolve(recipe, supplied=supplied.names())
    for caution in cautions(recipe):
        console.print(f"[yellow]caution:[/yellow] {caution}")
    config = {**to_dict(recipe), **supplied.config(), **fingerprints(recipe)}
    folder = RunFolder.create(recipe.run.folder, config=config, recipe=text)
    if folder.finished:
        console.print(f"{folder.path}: finished already; nothing to do")
        return Run(folder)
    torch.set_num_threads(choose_threads(recipe))
    if recipe.run.deterministic:
        torch.use_deterministic_algorithms(True)
    for stage in folder.stages:
        if stage not in recipe.stages:  # of an earlier recipe: its results are not this run's
            folder.set_aside(stage)
    job = _Job(recipe, folder, supplied=supplied, console=console)
    try:
        for stage in recipe.stages:
            job.do(stage)
    finally:
        job.close()
    return finish_run(folder, recipe=recipe, seconds=time.monotonic() - started, console=console)


class _Job:
    """A run under way: the policy goes from stage to stage, in memory or through the folder."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, *, supplied: Supplied, console: Console
    ) -> None:
        self._recipe = recipe
        self._config = folder.config
        self._folder = folder
        self._supplied = supplied
        self._console = console
        self._device = choose_device(recipe)
        self._digest = config_digest(self._config["model"], str(recipe.run.seed))
        self._parts: Parts | None = None
        self._load(recipe.model.name)
        check_early(recipe, self._policy)

    def do(self, stage: str) -> None:
        """Run one stage, unless it is finished under this very config."""
        asked = {
            key: self._config.get(key, {})
            for key in (stage, "task", "rewards", "supplied", "contents")
        }
        self._digest = config_digest(asked, self._digest)
        if self._folder.stage_done(stage, self._digest):
            self._console.print(f"{stage}: finished already; taken from the run folder")
            if stage != "reward" and self._folder.stage(stage).model.is_dir():
                self._load(str(self._folder.stage(stage).model))
            return
        work = {
            "sft": self._sft,
            "prefer": self._prefer,
            "reward": self._reward,
            "rl": self._rl,
            "eval": self._eval,
        }[stage]
        self._folder.finish(stage, digest=self._digest, record=work())

    def close(self) -> None:
        """End what runs beside this process."""
        if self._parts is not None:
            self._parts.close()

    @property
    def _ready(self) -> Parts:
        assert self._parts is not None, "they are made with the policy"
        return self._parts

    def _load(self, source: str) -> None:
        self.close()
        self._policy: Policy = make_policy(self._recipe, source, device=self._device)
        self._parts = make_parts(
            self._recipe,
            self._policy,
            device=self._device,
            task=self._supplied.task,
            rewards=self._supplied.rewards,
            reward_model=self._folder.stage("reward").model,
        )

    def _sft(self) -> Mapping[str, Any]:
        rows = sft_rows(self._recipe, self._policy, parts=self._ready)
        with self._stage("sft", total_steps=sft_steps(self._recipe, len(rows))) as context:
            run_sft(context, rows)
        return {"demonstrations": len(rows)}

    def _prefer(self) -> Mapping[str, Any]:
        task = self._ready.task
        prompts = len(task.prompts("train")) if task is not None else 0
        with self._stage("prefer", total_steps=prefer_steps(self._recipe, prompts)) as context:
            return run_prefer(context)

    def _reward(self) -> Mapping[str, Any]:
        job = prepare_reward(
            self._recipe,
            self._policy,
            device=self._device,
            prefer=self._folder.stage("prefer").path,
        )
        steps = job.num_steps(filled(self._recipe.reward))
        with self._stage("reward", total_steps=steps) as context:
            return run_reward(context, job)

    def _rl(self) -> Mapping[str, Any]:
        section = filled(self._recipe.rl)
        record: dict[str, Any] = {}
        with self._stage("rl", total_steps=section.steps) as context:
            if section.check:
                before_rl(context, engine=self._supplied.engine).announce(self._console)
            if "eval" in self._recipe.stages and self._recipe.eval is not None:
                before = run_eval(context, self._recipe.eval, engine=self._supplied.engine)
                record["before"] = write_evaluation(context.folder.path / "before.jsonl", before)
            run_rl(context, engine=self._supplied.engine)
        return record

    def _eval(self) -> Mapping[str, Any]:
        section = filled(self._recipe.eval)
        with self._stage("eval", total_steps=0) as context:
            found = run_eval(context, section, engine=self._supplied.engine)
            return {"after": write_evaluation(context.folder.path / "problems.jsonl", found)}

    @contextlib.contextmanager
    def _stage(self, stage: str, *, total_steps: int) -> Iterator[Context]:
        folder = self._folder.begin(stage, replace=True)
        tracked = TrackedStage(
            name=stage,
            folder=folder.path,
            total_steps=total_steps,
            title=TITLES[stage],
            config=self._config.get(stage, {}),
        )
        # The console comes last: its live display starts only once the others could be made.
        shown = () if self._console.quiet else ("console",)
        names = ("jsonl", *self._recipe.run.trackers, *shown) if total_steps else ()
        trackers = [TRACKERS[name](tracked) for name in names]
        tracker: Tracker = Several(trackers)
        if stage == "rl":
            supplied = self._supplied.engine is not None
            tracker = diagnosed(
                trackers, folder.path, recipe=self._recipe, parts=self._ready, supplied=supplied
            )
        try:
            yield Context(
                recipe=self._recipe,
                policy=self._policy,
                parts=self._ready,
                folder=folder,
                tracker=tracker,
                reward_model=self._folder.stage("reward").model,
            )
        finally:
            tracker.close()
