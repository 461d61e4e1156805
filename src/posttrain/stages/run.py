"""A whole run: the stages of a recipe in order, into one folder that can be looked at and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from posttrain.build.setup import Supplied
from posttrain.config import Recipe, resolve, to_dict
from posttrain.config.paths import check_model_paths
from posttrain.config.recipe_rules import trains_several
from posttrain.runs import RunFolder
from posttrain.stages.guards import guarded
from posttrain.stages.results import Run
from posttrain.stages.whole.one_run import run_one
from posttrain.stages.whole.places import check_replaced, undo_killed, undone
from posttrain.stages.whole.together import run_together
from posttrain.track.progress import showing
from posttrain.track.safe_terminal import Terminal


def run(
    recipe: Recipe,
    supplied: Supplied | None = None,
    *,
    text: str | None = None,
    console: Console | None = None,
    resume: bool = False,
    overwrite: bool = False,
    start: Callable[[], None] | None = None,
    allow_changes: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Run every stage of a recipe that is not finished yet, and return what came out.

    ``text`` is the recipe as the user wrote it, kept in the folder. A quiet ``console`` silences
    the live display too. With ``resume`` a stage that was cut short goes on from its last
    checkpoint, exactly as if it had not been; another recipe, data or code are then refused, but
    for the keys in ``allow_changes``. Without, it starts anew. With ``overwrite`` a run in its
    folder goes before the first step. ``start`` writes what it begins with into the folder.
    ``clock`` is the time source of timed checkpoints.
    """
    supplied, console = supplied or Supplied(), console or Terminal()
    resolved = resolve(recipe, supplied=supplied)
    folder = resolved.run.folder
    undo_killed(folder, resume=resume)
    check_model_paths(resolved, anew=overwrite, written=start is not None)
    if trains_several(resolved) and "callbacks" in supplied:
        raise ValueError("callbacks: do not work with several adapters; train one, or drop them")
    work = run_together if trains_several(resolved) else run_one
    if overwrite:
        given = {name: table for name, table in to_dict(resolved).items() if name != "run"}
        if start is not None:
            given["model"] = {}  # an object: its folder in the run is written anew
        check_replaced(folder, used=given)
    made = not Path(folder).exists()
    undoing = undone(folder, made=made, overwrite=overwrite, resume=resume)
    with showing(console), guarded(resolved), undoing:
        if start is not None and not RunFolder.marked(folder).finished:
            start()
        return work(
            resolved,
            supplied,
            text=text,
            console=console,
            resume=resume,
            allow_changes=allow_changes,
            clock=clock,
        )
