"""``posttrain check``: whether a run can work, before it begins.

An exception in a check becomes a line: it fails where a run would break too, and warns where the
check itself broke. Nothing is trained, and every weight that a check changes is restored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from posttrain.build.setup import Setup, Supplied
from posttrain.build.threads import own_threads
from posttrain.check.bench import Bench
from posttrain.check.checklist import CHECKS, run_checks
from posttrain.check.verdicts import AREAS, CheckFailedError, Line, Report
from posttrain.config import Quantity, Recipe, arithmetic, read_recipe, recipe_from_dict
from posttrain.config.read import parse_overrides, read_values
from posttrain.models.quiet import compiler_explained
from posttrain.track.progress import phase

__all__ = [
    "CheckFailedError",
    "Line",
    "Report",
    "before_rl",
    "before_run",
    "check_file",
    "check_recipe",
]


def check_file(path: str | Path, overrides: Sequence[str] = (), *, fast: bool = False) -> Report:
    """Check the recipe in a file; a file or a command line that cannot be read raises."""
    parse_overrides(overrides)
    read_values(Path(path))
    return _check(lambda: read_recipe(path, overrides), fast=fast, supplied=None)


def check_recipe(
    recipe: Recipe | Mapping[str, Any], *, fast: bool = False, supplied: Supplied | None = None
) -> Report:
    """Check a recipe, or the dict of one; ``supplied`` are parts handed over as objects."""

    def read() -> Recipe:
        return recipe if isinstance(recipe, Recipe) else recipe_from_dict(recipe)

    return _check(read, fast=fast, supplied=supplied)


def _check(read: Callable[[], Recipe], *, fast: bool, supplied: Supplied | None) -> Report:
    bench = Bench("check", fast=fast, supplied=supplied)
    bench.read = read
    with own_threads(), compiler_explained():
        try:
            return _report(bench)
        finally:
            bench.close()
            if bench.has("setup"):
                bench.setup.close()


def before_run(setup: Setup, stages: Sequence[str], *, console: Console) -> None:
    """Refuse at the start what would break a later stage, and print cautions about the rest.

    What :func:`before_rl` checks again is left to it.
    """
    bench = Bench("start")
    bench.take(setup.recipe, stages)
    bench.take_setup(setup)
    later = {check.name for check in CHECKS if "rl" in check.at}
    with phase("reading the data"):
        lines = run_checks(bench)
    for line in lines:
        if line.state == "fail":
            raise ValueError(f"{line.name}: {line.text}; {line.fix}")
        if line.state == "warn" and line.name not in later:
            said = f"{line.text}; {line.fix}"
            console.print(Text.assemble(("caution: ", "yellow"), said), soft_wrap=True)


def before_rl(setup: Setup) -> Report:
    """The quick check of an rl stage that is about to begin, on the parts that it will use."""
    bench = Bench("rl", fast=True)
    bench.take(setup.recipe, ["rl"])
    bench.take_setup(setup)
    with contextlib.closing(bench):
        return _report(bench)


def _report(bench: Bench) -> Report:
    begun = time.perf_counter()
    lines = run_checks(bench)
    rows: Sequence[Quantity] = ()
    if bench.moment == "check" and bench.has("recipe"):
        prompts = len(bench.task.prompts("train")) if bench.has("task") else None
        rows = arithmetic(bench.recipe, num_prompts=prompts)
    return Report(
        lines=[line for area in AREAS for line in lines if line.area == area],
        arithmetic=rows,
        episode=bench.episode if bench.has("episode") else (),
        seconds=time.perf_counter() - begun,
    )
