"""A whole run: the stages of a recipe in order, into one folder that can be looked at and kept."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from posttrain.build.fingerprint import code_version, fingerprints, supplied_digests
from posttrain.build.model_source import check_models
from posttrain.build.setup import Supplied
from posttrain.build.start_folder import note_places
from posttrain.config import Recipe, Resolved, cautions, resolve, to_dict
from posttrain.runs import RunFolder
from posttrain.runs.finished import check_finished
from posttrain.runs.interrupts import Interrupts
from posttrain.runs.resume import check_same, resume_hint, set_unfinished_aside, stage_digests
from posttrain.stages import STAGES
from posttrain.stages.guards import guarded
from posttrain.stages.job import Job
from posttrain.stages.results import Run, finish_run
from posttrain.track.progress import showing
from posttrain.track.safe_terminal import Terminal


def run(
    recipe: Recipe,
    supplied: Supplied | None = None,
    *,
    text: str | None = None,
    console: Console | None = None,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Run every stage of a recipe that is not finished yet, and return what came out.

    ``text`` is the recipe as the user wrote it, kept in the folder. A quiet ``console`` silences
    the live display too. With ``resume`` a stage that was cut short goes on from its last
    checkpoint, exactly as if it had not been; another recipe, data or code are then refused, but
    for the keys in ``allow_changes``. Without, it starts anew. ``clock`` is the time source
    of timed checkpoints.
    """
    supplied, console = supplied or Supplied(), console or Terminal()
    resolved = resolve(recipe, supplied=supplied)
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
    clock: Callable[[], float],
) -> Run:
    for caution in cautions(recipe):
        console.print(Text.assemble(("caution: ", "yellow"), caution), soft_wrap=True)
    say = functools.partial(console.print, soft_wrap=True)
    config = {**to_dict(recipe), **supplied_digests(supplied), **fingerprints(recipe)}
    config["code"] = code_version()
    check_models(recipe)
    if resume:
        for change in check_same(recipe.run.folder, config, allow=allow_changes):
            say(f"allowed to change: {change}")
    check_finished(recipe.run.folder, stage_digests(config, recipe.stages), say=say)
    if not resume:
        set_unfinished_aside(recipe.run.folder, list(STAGES), say=say)
    folder = RunFolder.create(recipe.run.folder, config=config, recipe=text)
    if folder.holds(recipe.stages):
        console.print(f"{folder.path}: finished already; nothing to do")
        return Run(folder)
    (folder.path / "summary.json").unlink(missing_ok=True)  # left by an earlier run in this folder
    note_places(folder, recipe)
    for stage in folder.stages:
        if stage not in recipe.stages:  # of an earlier recipe: its results are not this run's
            folder.set_aside(stage)
    with resume_hint(folder), Interrupts() as interrupts:
        job = Job(
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
                job.do(stage, STAGES[stage])
            job.check()
        finally:
            job.close()
        return finish_run(folder, recipe=recipe, seconds=job.seconds(), console=console)
