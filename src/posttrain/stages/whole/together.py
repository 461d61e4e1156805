"""Several adapters in one run: each is a run in a folder of its own, and all go side by side."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from posttrain.build.fingerprint import run_config
from posttrain.build.model_source import note_places
from posttrain.build.setup import Supplied, choose_device, hardware
from posttrain.build.several.members import AdapterMember, Together
from posttrain.build.several.sweep import FOLDER, members, varied
from posttrain.config import Resolved, to_dict
from posttrain.runs import RunFolder
from posttrain.runs.interrupts import Interrupts
from posttrain.runs.resume import check_same
from posttrain.stages.results import Run
from posttrain.stages.whole.one_run import interruptible, run_one
from posttrain.track.printable import printable
from posttrain.track.safe_terminal import Terminal

SHOWN = {
    "accuracy_before": "accuracy before",
    "accuracy_after": "accuracy after",
    "reward_first": "reward first",
    "reward_last": "reward last",
}


def run_together(
    recipe: Resolved,
    supplied: Supplied,
    *,
    text: str | None,
    console: Console,
    resume: bool,
    allow_changes: Sequence[str],
    clock: Callable[[], float],
) -> Run:
    """Train all adapters of a recipe at once; ``RUN/adapters/0`` is what its first would be alone.

    One that fails leaves the others as they are; what it raised is raised at the end.
    """
    recipes = members(recipe, supplied=supplied)
    config = run_config(recipe, supplied)
    if resume:
        check_same(recipe.run.folder, config, allow=allow_changes)
    folder = RunFolder.create(recipe.run.folder, config=config, recipe=text)
    note_places(folder, recipe)
    together = Together(len(recipes), folder=recipe.run.folder, visible=not console.quiet)
    quiet, began = Terminal(quiet=True), time.monotonic()

    def work(member: AdapterMember) -> Run:
        return run_one(
            recipes[member.number],
            supplied,
            text=None,
            console=console if member.number == 0 else quiet,
            resume=resume,
            allow_changes=allow_changes,
            clock=clock,
            watched=lambda _: contextlib.nullcontext(interrupts),
            member=member,
        )

    interrupts: Interrupts
    with interruptible(folder) as interrupts, warnings.catch_warnings():
        ended = together.run(work)
        _raise_first(ended, folder)
    runs = [run for run in ended if isinstance(run, Run)]
    found = summarise(recipes, runs, keys=varied(recipe))
    facts = {"seconds": time.monotonic() - began, "hardware": hardware(choose_device(recipe))}
    folder.write_summary({**facts, "stages": list(recipe.stages), **found})
    console.print(render(found), crop=False)
    console.print(f"each adapter is a run: posttrain runs {folder.path / FOLDER}", soft_wrap=True)
    return Run(folder)


def _raise_first(ended: Sequence[Run | BaseException], folder: RunFolder) -> None:
    """Raise what the first adapter that failed has raised, and say which have failed."""
    failed = {n: error for n, error in enumerate(ended) if isinstance(error, BaseException)}
    if not failed:
        return
    error = next(iter(failed.values()))
    if isinstance(error, Exception):
        others = len(ended) - len(failed)
        which = ", ".join(str(folder.path / FOLDER / str(each)) for each in failed)
        error.add_note(f"this ended {which}; {others} of {len(ended)} adapters came to their end")
    raise error


def summarise(
    recipes: Sequence[Resolved], runs: Sequence[Run], *, keys: Sequence[str]
) -> dict[str, Any]:
    """What came out of each adapter, and for each setting of ``keys`` the spread over its seeds."""
    rows: list[dict[str, Any]] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for recipe, run in zip(recipes, runs, strict=True):
        numbers = {name: run.summary[name] for name in SHOWN if name in run.summary}
        settings = {key: _value(recipe, key) for key in keys if key != "run.seed"}
        row = {"folder": str(run.folder.path), "seed": recipe.run.seed, "settings": settings}
        rows.append(row | numbers)
        groups.setdefault(repr(settings), []).append(rows[-1])
    return {"adapters": rows, "settings": [_over_seeds(group) for group in groups.values()]}


def _over_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The adapters of one setting: mean and sample deviation of what came out."""
    found: dict[str, Any] = {"settings": rows[0]["settings"], "number": len(rows)}
    for name in SHOWN:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else None
            found[name] = {"mean": statistics.fmean(values), "deviation": spread}
    return found


def _value(recipe: Resolved, key: str) -> Any:
    value: Any = to_dict(recipe)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def render(found: Mapping[str, Any]) -> Table:
    """The settings of a run with several adapters, with means and deviations over seeds."""
    rows = found["settings"]
    keys = list(rows[0]["settings"])
    shown = [name for name in SHOWN if any(name in row for row in rows)]
    table = Table()
    for heading in (*keys, "adapters", *(SHOWN[name] for name in shown)):
        right = heading not in keys
        table.add_column(
            escape(printable(heading)), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        settings = [Text(printable(str(row["settings"][key]))) for key in keys]
        table.add_row(*settings, str(row["number"]), *(_spread(row.get(name)) for name in shown))
    return table


def _spread(number: Mapping[str, float | None] | None) -> str:
    if number is None:
        return "-"
    spread = number["deviation"]
    return f"{number['mean']:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
