"""A whole run: the stages of a recipe in order, into one folder that can be looked at and kept."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from posttrain.build.fingerprint import code_version, fingerprints
from posttrain.build.setup import (
    Parts,
    choose_device,
    make_parts,
    make_policy,
)
from posttrain.build.sft_rows import fitting, sft_rows
from posttrain.build.start_folder import note_places
from posttrain.build.supplied import Supplied
from posttrain.build.threads import own_threads, settle_threads
from posttrain.check import before_rl, before_run
from posttrain.config import Recipe, Resolved, cautions, resolve, to_dict
from posttrain.disk import keeping
from posttrain.models.load import Policy
from posttrain.protocols import Tracker
from posttrain.registry import look_up
from posttrain.report.facts import TITLES
from posttrain.runs import RunFolder
from posttrain.runs.checkpoints import clear
from posttrain.runs.finished import Finished, check_finished, check_models
from posttrain.runs.interrupts import Interrupts
from posttrain.runs.keeper import Keeper
from posttrain.runs.pace import Clock
from posttrain.runs.resume import (
    check_same,
    set_unfinished_aside,
    stage_digests,
    start,
    take_up,
    told,
)
from posttrain.stages.diagnosis import (
    DIAGNOSED,
    diagnosed,
    held_out,
    judge_outcome,
    make_setup,
    verdict_metrics,
)
from posttrain.stages.eval import after, before
from posttrain.stages.guards import guarded
from posttrain.stages.prefer import (
    prefer_steps,
    prepare_reward,
    run_prefer,
    run_reward,
)
from posttrain.stages.results import Run, finish_run
from posttrain.stages.rl import Context, run_rl
from posttrain.stages.sft import run_sft, sft_steps
from posttrain.track import TRACKERS, ConsoleTracker, Several
from posttrain.track import Stage as TrackedStage
from posttrain.track.diagnosis import Diagnosing, Setup
from posttrain.track.progress import phase, showing
from posttrain.track.terminal import Terminal

__all__ = ["Supplied", "run"]


def run(
    recipe: Recipe,
    supplied: Supplied | None = None,
    *,
    text: str | None = None,
    console: Console | None = None,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    clock: Clock = time.monotonic,
) -> Run:
    """Run every stage of a recipe that is not finished yet, and return what came out.

    ``text`` is the recipe as the user wrote it, kept in the folder. A quiet ``console`` silences
    the live display too. With ``resume`` a stage that was cut short goes on from its last
    checkpoint, exactly as if it had not been; another recipe, data or code are then refused, but
    for the keys in ``allow_changes``. Without, it starts anew. ``clock`` tells the seconds by
    which checkpoints come.
    """
    supplied, console = supplied or Supplied(), console or Terminal()
    resolved = resolve(recipe, supplied=supplied.names())
    with showing(console), guarded(resolved):
        return _run(
            resolved,
            supplied,
            text=text,
            console=console,
            resume=resume,
            allow_changes=allow_changes,
            clock=clock,
        )


def _run(
    recipe: Resolved,
    supplied: Supplied,
    *,
    text: str | None,
    console: Console,
    resume: bool,
    allow_changes: Sequence[str],
    clock: Clock,
) -> Run:
    for caution in cautions(recipe):
        console.print(Text.assemble(("caution: ", "yellow"), caution), soft_wrap=True)
    config = {**to_dict(recipe), **supplied.config(), **fingerprints(recipe)}
    config["code"] = code_version()
    check_models(recipe)
    if resume:
        for change in check_same(recipe.run.folder, config, allow=allow_changes):
            console.print(f"allowed to change: {change}", soft_wrap=True)
    check_finished(recipe.run.folder, stage_digests(config, recipe.stages), console=console)
    if not resume:
        set_unfinished_aside(recipe.run.folder, console)
    folder = RunFolder.create(recipe.run.folder, config=config, recipe=text)
    if folder.holds(recipe.stages):
        console.print(f"{folder.path}: finished already; nothing to do")
        return Run(folder)
    (folder.path / "summary.json").unlink(missing_ok=True)  # of a run whose stages are gone
    note_places(folder, recipe)
    for stage in folder.stages:
        if stage not in recipe.stages:  # of an earlier recipe: its results are not this run's
            folder.set_aside(stage)
    with own_threads(), told(folder), Interrupts() as interrupts:
        job = _Job(
            recipe,
            folder,
            supplied=supplied,
            console=console,
            interrupts=interrupts,
            resume=resume,
            clock=clock,
        )
        try:
            for stage in recipe.stages:
                job.do(stage)
            job.check()
        finally:
            job.close()
        return finish_run(folder, recipe=recipe, seconds=job.seconds(), console=console)


@contextlib.contextmanager
def _said_before(checked: bool) -> Iterator[None]:
    """Where the check has counted prompts that are too long, they are not warned of again."""
    with warnings.catch_warnings():
        if checked:
            warnings.filterwarnings("ignore", message=r".*prompts leave no room")
        yield


class _Job:
    """A run under way: the policy goes from stage to stage, in memory or through the folder."""

    def __init__(
        self,
        recipe: Resolved,
        folder: RunFolder,
        *,
        supplied: Supplied,
        console: Console,
        interrupts: Interrupts,
        resume: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._recipe = recipe
        self._clock = clock
        self._started, self._seconds_before = time.monotonic(), 0.0
        self._interrupts = interrupts
        self._resume = resume
        self._config = folder.config
        self._folder = folder
        self._supplied = supplied
        self._console = console
        self._device = choose_device(recipe)
        self._digests = stage_digests(self._config, recipe.stages)
        self._finished = Finished(folder)
        self._parts: Parts | None = None
        self._load(recipe.model.name)
        with contextlib.ExitStack() as refused:
            refused.callback(self.close)
            chosen = settle_threads(recipe, self._policy, folder=folder, resume=resume)
            if chosen.worth_saying:
                console.print(str(chosen), soft_wrap=True)
            coming = [s for s in recipe.stages if not folder.stage_done(s, self._digests[s])]
            before_run(recipe, self._policy, parts=self._ready, stages=coming, console=console)
            refused.pop_all()

    def seconds(self) -> float:
        """How long the run has worked, in this process and in those before it."""
        return self._seconds_before + time.monotonic() - self._started

    def check(self) -> None:
        """Raise where the run was asked to stop, or where something of it was taken away."""
        self._interrupts.check()
        self._finished.check()

    def do(self, stage: str) -> None:
        """Run one stage, unless it is finished under this very config."""
        self.check()
        if self._finished.holds(stage, digest=self._digests[stage], console=self._console):
            self._seconds_before = (self._folder.stage_record(stage) or {}).get("seconds", 0.0)
            self._console.print(f"{stage}: finished already; taken from the run folder")
            if stage in ("sft", "rl"):
                self._load(str(self._folder.stage(stage).model))
        else:
            self._work(stage)
        self._tidy(stage)  # of one that was taken too: the run may have been cut short before
        self._finished.add(stage)

    def _work(self, stage: str) -> None:
        work = {
            "sft": self._sft,
            "prefer": self._prefer,
            "reward": self._reward,
            "rl": self._rl,
            "eval": self._eval,
        }[stage]
        record = {**work(), "seconds": self.seconds()}
        self._folder.finish(
            stage,
            digest=self._digests[stage],
            inputs=self._finished.inputs,
            position=self._recipe.stages.index(stage),
            record=record,
        )

    def _tidy(self, stage: str) -> None:
        """Of a finished stage, remove checkpoints that no one asked for: its model is there."""
        asked = getattr(getattr(self._recipe, stage), "save_every", None) is not None
        if not asked and self._recipe.run.keep_last:
            clear(self._folder.stage(stage))

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
        read = sft_rows(self._recipe, self._policy, parts=self._ready)
        rows = fitting(read, self._policy, section=self._recipe.sft)
        if rows.note:
            self._console.print(rows.note, soft_wrap=True)
        with self._stage("sft", total_steps=sft_steps(self._recipe, len(rows.train))) as context:
            return run_sft(context, rows)

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
        steps = job.num_steps(self._recipe.reward)
        with self._stage("reward", total_steps=steps) as context:
            record = run_reward(context, job)
            if isinstance(context.tracker, Diagnosing):
                context.tracker.finish(verdict_metrics(record["verdict"]))
            return record

    def _rl(self) -> Mapping[str, Any]:
        section = self._recipe.rl
        record: dict[str, Any] = {}
        stage = self._stage("rl", total_steps=section.steps)
        with stage as context, _said_before(section.check != "off"):
            if section.check != "off" and not context.keeper.step:
                with phase("checking: data, rewards, a few rollouts, one step"):
                    report = before_rl(context, supplied=self._supplied)
                report.announce(self._console).enforce(section.check)
            if "eval" in self._recipe.stages:
                record["before"] = before(context, self._recipe.eval, engine=self._supplied.engine)
                if isinstance(context.tracker, Diagnosing):
                    context.tracker.starts_from(held_out(record["before"], self._setup()))
            run_rl(context, engine=self._supplied.engine)
        return record

    def _eval(self) -> Mapping[str, Any]:
        section = self._recipe.eval
        with self._stage("eval", total_steps=0) as context:
            found = after(context, section, engine=self._supplied.engine)
            judge_outcome(self._folder, found, setup=self._setup())
            return {"after": found}

    @contextlib.contextmanager
    def _stage(self, stage: str, *, total_steps: int) -> Iterator[Context]:
        prepared = self._prepared(stage, total_steps=total_steps)
        with phase(f"stage {stage}"), prepared as context, keeping(context.folder.path):
            yield context

    @contextlib.contextmanager
    def _prepared(self, stage: str, *, total_steps: int) -> Iterator[Context]:
        marks: Any = {"digest": self._digests[stage], "inputs": self._finished.inputs}
        begins_at = None
        if self._resume:
            folder, begins_at = take_up(self._folder, stage, console=self._console, **marks)
            if begins_at is not None:
                self._seconds_before = begins_at.state["seconds"]
        else:
            folder = start(self._folder, stage, console=self._console, **marks)
        if stage in ("rl", "eval"):
            folder.write_marks(self._ready.marks)
        keeper = Keeper(
            folder,
            interrupts=self._interrupts,
            begins_at=begins_at,
            save_minutes=self._recipe.run.save_minutes,
            keep_last=self._recipe.run.keep_last,
            keep_best=self._recipe.run.keep_best,
            seconds=self.seconds,
            clock=self._clock,
        )
        tracked = TrackedStage(
            name=stage,
            folder=folder.path,
            total_steps=total_steps,
            title=TITLES[stage],
            steps_before=keeper.step,
            config=self._config.get(stage, {}),
            marks=self._ready.marks if stage == "rl" else None,
        )
        # The console comes last: its live display starts only once the others could be made.
        shown = () if self._console.quiet else ("console",)
        names = ("jsonl", *self._recipe.run.trackers, *shown) if total_steps else ()
        trackers = [look_up(name, TRACKERS, kind="run.trackers")(tracked) for name in names]
        for seen in trackers:
            if isinstance(seen, ConsoleTracker):
                keeper.tell, keeper.say = seen.note, seen.say
        tracker: Tracker = Several(trackers)
        try:
            if stage in DIAGNOSED:
                setup = self._setup(sft_steps=total_steps if stage == "sft" else 0)
                tracker = diagnosed(trackers, folder, stage=stage, setup=setup)
            yield Context(
                recipe=self._recipe,
                policy=self._policy,
                parts=self._ready,
                folder=folder,
                tracker=tracker,
                keeper=keeper,
                reward_model=self._folder.stage("reward").model,
            )
            if isinstance(tracker, Diagnosing):
                tracker.finish()
        finally:
            tracker.close()

    def _setup(self, *, sft_steps: int = 0) -> Setup:
        """What the rules of the diagnosis have to know."""
        epochs = self._recipe.sft.epochs if "sft" in self._recipe.stages else 1
        return make_setup(
            self._recipe,
            self._ready,
            steps_per_epoch=sft_steps // epochs,
            supplied=self._supplied.engine is not None,
        )
