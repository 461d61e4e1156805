"""One run, from the folder that it goes into to its summary: stage after stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from posttrain.build.fingerprint import run_config
from posttrain.build.model_source import check_models, note_places
from posttrain.build.setup import Supplied
from posttrain.config import Resolved, cautions
from posttrain.runs import RunFolder
from posttrain.runs.before import BEFORE
from posttrain.runs.finished import check_finished
from posttrain.runs.interrupts import Interrupts
from posttrain.runs.resume import check_same, resume_hint, set_unfinished_aside, stage_digests
from posttrain.stages import STAGES
from posttrain.stages.job import Job
from posttrain.stages.results import Run, finish_run
from posttrain.track.safe_terminal import Terminal

if TYPE_CHECKING:
    from posttrain.build.setup import AdapterMember

Watched = Callable[[RunFolder], contextlib.AbstractContextManager[Interrupts]]


@contextlib.contextmanager
def interruptible(folder: RunFolder) -> Iterator[Interrupts]:
    """Inside, signals end the run after a step, and what ends it early says how it can go on."""
    with resume_hint(folder, new=(folder.path / BEFORE).exists), Interrupts() as interrupts:
        yield interrupts


def run_one(
    recipe: Resolved,
    supplied: Supplied,
    *,
    text: str | None,
    console: Console,
    resume: bool,
    allow_changes: Sequence[str],
    clock: Callable[[], float],
    watched: Watched = interruptible,
    member: AdapterMember | None = None,
) -> Run:
    """Run every stage of a recipe that is not finished yet; ``member`` is its place among several.

    What such a one comes to is for whoever has started them all to tell.
    """
    for caution in cautions(recipe):
        console.print(Text.assemble(("caution: ", "yellow"), caution), soft_wrap=True)
    say = functools.partial(console.print, soft_wrap=True)
    config = run_config(recipe, supplied)
    check_models(recipe)
    if resume:
        for change in check_same(recipe.run.folder, config, allow=allow_changes):
            say(f"allowed to change: {change}")
    check_finished(recipe.run.folder, stage_digests(config, recipe.stages), say=say)
    if not resume:
        set_unfinished_aside(recipe.run.folder, list(STAGES), config=config, say=say)
    folder = RunFolder.create(recipe.run.folder, config=config, recipe=text)
    if folder.holds(recipe.stages):
        console.print(f"{folder.path}: already finished; nothing to do")
        return Run(folder)
    (folder.path / "summary.json").unlink(missing_ok=True)  # left by an earlier run in this folder
    note_places(folder, recipe)
    for stage in folder.stages:
        if stage not in recipe.stages:  # of an earlier recipe: its results are not this run's
            folder.set_aside(stage)
    with watched(folder) as interrupts:
        job = Job(
            recipe,
            folder,
            supplied=supplied,
            console=console,
            interrupts=interrupts,
            resume=resume,
            clock=clock,
            member=member,
        )
        try:
            job.say_data()
            for stage in recipe.stages:
                job.do(stage, STAGES[stage])
            job.check()
        finally:
            job.close()
        told = console if member is None else Terminal(quiet=True)
        return finish_run(folder, recipe=recipe, seconds=job.seconds(), console=told)
