"""A run under way: the policy goes from stage to stage, in memory or through the folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from posttrain.build.rows import data_told
from posttrain.build.setup import Setup, Supplied, choose_device, make_policy, make_setup
from posttrain.build.threads import settle_threads
from posttrain.check import before_run
from posttrain.config import Resolved
from posttrain.distributed.connect import connect
from posttrain.report.facts import TITLES
from posttrain.runs import RunFolder, clear_checkpoints
from posttrain.runs.finished import Finished
from posttrain.runs.interrupts import Interrupts
from posttrain.runs.keeper import Keeper
from posttrain.runs.resume import PROLONGED, resume_stage, stage_digests, start_stage
from posttrain.stages.diagnosis import DIAGNOSED, make_background
from posttrain.stages.open_stage import OpenStage, tracked
from posttrain.track import Stage, phase

if TYPE_CHECKING:
    from posttrain.build.setup import AdapterMember

Work = Callable[[Setup, "Job"], Mapping[str, Any]]
"""What a stage does: with the setup, into the folder that the job opens; what its record says."""


class Job:
    """Takes stage after stage, from where the run folder stands."""

    setup: Setup

    def __init__(
        self,
        recipe: Resolved,
        folder: RunFolder,
        *,
        supplied: Supplied,
        console: Console,
        interrupts: Interrupts,
        resume: bool,
        clock: Callable[[], float],
        member: AdapterMember | None = None,
    ) -> None:
        self.folder, self.console, self._member = folder, console, member
        self._recipe, self._supplied = recipe, supplied
        self._interrupts, self._resume, self._clock = interrupts, resume, clock
        self._started, self._seconds_before = time.monotonic(), 0.0
        self._digests = stage_digests(folder.config, recipe.stages)
        self._finished = Finished(folder)
        self._trackers: dict[str, bool] = {}  # by name, whether it is still used
        self._replicas = 1  # until the threads are settled
        self._stopped: dict[str, Any] = {}  # by a callback, the stage under way
        self._cluster = connect(recipe, folder.path, say=self.say)
        with contextlib.ExitStack() as refused:
            refused.callback(self.close)
            self._load(recipe.model.name)
            known = None if member is None else member.threads
            chosen = settle_threads(
                recipe, self.setup.policy, folder=folder, resume=resume, known=known
            )
            self._replicas = chosen.replicas
            self.setup = replace(self.setup, replicas=self._replicas)
            if member is not None:
                member.threads = chosen
            if chosen.worth_saying:
                self.say(str(chosen))
            coming = [s for s in recipe.stages if not folder.stage_done(s, self._digests[s])]
            before_run(self.setup, coming, console=console)
            refused.pop_all()

    def say(self, text: str) -> None:
        """Print a line to the user."""
        self.console.print(text, soft_wrap=True)

    def say_data(self) -> None:
        """Print how the data of the run is understood."""
        for line in data_told(self._recipe, self.setup.task):
            self.say(line)
        task, handed = self.setup.task, self.setup.handed_rewards
        own = task.rewards if task is not None and bool(getattr(task, "told", "")) else {}
        scored = handed is not None or self._recipe.rewards or self.setup.env is not None
        if "rl" in self._recipe.stages and own and not scored:
            self.say(f"reward: none is given; {', '.join(own)} compares with the answers")

    def seconds(self) -> float:
        """How long the run has worked, in this process and in those before it."""
        return self._seconds_before + time.monotonic() - self._started

    def check(self) -> None:
        """Raise where the run was asked to stop, or where something of it was taken away."""
        self._interrupts.check()
        self._finished.check()

    def do(self, stage: str, work: Work) -> None:
        """Run one stage, unless it is finished under this very config."""
        self.check()
        digest = self._digests[stage]
        if self._finished.holds(stage, digest=digest, say=self.say):
            self._seconds_before = (self.folder.stage_record(stage) or {}).get("seconds", 0.0)
            self.say(f"{stage}: already finished; taken from the run folder")
            if stage in ("sft", "dpo", "rl"):
                self._load(str(self.folder.stage(stage).model))
        else:
            self._stopped = {}
            record = {**work(self.setup, self), "seconds": self.seconds(), **self._stopped}
            self.folder.finish(
                stage,
                digest=digest,
                inputs=self._finished.inputs,
                position=self._recipe.stages.index(stage),
                record=record,
            )
        self._tidy(stage)  # of one that was taken too: the run may have been cut short before
        self._finished.add(stage)

    def _tidy(self, stage: str) -> None:
        """Of a finished stage, remove checkpoints that no one asked for: its model is there.

        The last one that trains keeps that of its end, so that the run can be prolonged.
        """
        asked = getattr(getattr(self._recipe, stage), "save_every", None) is not None
        if not asked and self._recipe.run.keep_last:
            trains = [name for name in self._recipe.stages if name in PROLONGED]
            last = stage in trains[-1:]
            clear_checkpoints(self.folder.stage(stage), keep_last=int(last))

    def close(self) -> None:
        """End what runs beside this process."""
        self._close_setup()
        if self._cluster is not None:
            self._cluster.close()

    def _close_setup(self) -> None:
        if hasattr(self, "setup"):
            self.setup.close()

    def _load(self, source: str) -> None:
        self._close_setup()
        device, member = choose_device(self._recipe), self._member
        given: dict[str, Any] = {k: v for k, v in self._supplied.items() if k != "callbacks"}
        if member is None:
            policy = make_policy(self._recipe, source, device=device)
        else:
            policy = member.policy(self._recipe, source)
            given |= {"member": member, "engine": member.engine(self._recipe)}
        self.setup = make_setup(
            self._recipe,
            policy,
            device=device,
            reward_model=self.folder.stage("reward").model,
            cluster=self._cluster,
            **given,
        )
        self.setup = replace(self.setup, replicas=self._replicas)

    @contextlib.contextmanager
    def stage(self, stage: str, *, total_steps: int) -> Iterator[OpenStage]:
        """Open the folder, the checkpoints and the trackers of a stage of so many steps."""
        with phase(f"stage {stage}"):
            tracked = self._tracked(self._keeper(stage), stage, total_steps=total_steps)
            with tracked as opened:
                yield opened
            self._stopped = opened.callbacks.state()
            for ended in self._stopped.values():
                self.say(
                    f"{stage}: ended by a callback after step {ended['step']}: {ended['reason']}"
                )

    def _keeper(self, stage: str) -> Keeper:
        marks: Any = {"digest": self._digests[stage], "inputs": self._finished.inputs}
        begins_at = None
        if self._resume:
            folder, begins_at = resume_stage(self.folder, stage, say=self.say, **marks)
            if begins_at is not None:
                self._seconds_before = begins_at.state["seconds"]
        else:
            folder = start_stage(self.folder, stage, say=self.say, **marks)
        if stage in ("rl", "eval"):
            folder.write_marks(self.setup.marks)
        return Keeper(
            folder,
            interrupts=self._interrupts,
            begins_at=begins_at,
            save_minutes=self._recipe.run.save_minutes,
            keep_last=self._recipe.run.keep_last,
            keep_best=self._recipe.run.keep_best,
            seconds=self.seconds,
            clock=self._clock,
        )

    def _tracked(
        self, keeper: Keeper, stage: str, *, total_steps: int
    ) -> contextlib.AbstractContextManager[OpenStage]:
        opened = Stage(
            name=stage,
            folder=keeper.folder.path,
            total_steps=total_steps,
            title=TITLES[stage],
            steps_before=keeper.step,
            config=self.folder.config.get(stage, {}),
            marks=self.setup.marks if stage == "rl" else None,
        )
        # The console comes last: its live display starts only once the others could be made.
        beside = () if self._member is None else (self._member.tracker(opened),)
        shown = () if self.console.quiet or beside else ("console",)
        specs = ("jsonl", *self._recipe.run.trackers, *shown) if total_steps else ()
        background = None
        if stage in DIAGNOSED:
            sft = self._recipe.sft if stage == "sft" else None
            per_epoch = total_steps // sft.epochs if sft is not None and not sft.steps else 0
            background = make_background(self.setup, stage=stage, steps_per_epoch=per_epoch)
        return tracked(
            opened,
            keeper,
            specs=specs,
            beside=beside if total_steps else (),
            background=background,
            used=self._trackers,
            callbacks=self._supplied.get("callbacks", ()),
        )
