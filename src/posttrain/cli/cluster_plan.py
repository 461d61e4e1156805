"""``posttrain plan``: what a cluster would come to, as a table, or as JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from posttrain.config import read_recipe, resolve
from posttrain.model_paths import check_run
from posttrain.track.progress import loading, phase, showing
from posttrain.track.safe_terminal import Terminal, say_json

if TYPE_CHECKING:
    from posttrain.distributed.plans.simulate import Layout, Prediction


def plans_cluster(arguments: Sequence[str]) -> bool:
    """Whether a recipe itself has a [cluster]."""
    path, *overrides = arguments
    return path.endswith(".toml") and read_recipe(path, overrides).cluster is not None


def plan_recipe(arguments: Sequence[str], *, run: Path | None, as_json: bool, **asked: Any) -> None:
    """Predict the steps of a recipe on a cluster, and print them beside those of others.

    ``asked`` are the fields of :class:`posttrain.distributed.plans.compared.Asked`.
    """
    if run is not None:
        check_run(run)
    path, *overrides = arguments
    recipe = resolve(read_recipe(path, overrides))
    if "rl" not in recipe.stages:
        raise ValueError(f"plan: {path} has no stage rl, and nothing else samples beside learning")
    with loading():
        from posttrain.distributed.plans.compared import (
            Asked,
            assumptions,
            conclusion,
            layouts_of,
            predicted,
        )
        from posttrain.distributed.plans.measured import shown
        from posttrain.distributed.plans.run_costs import from_run
        from posttrain.distributed.plans.trial_costs import from_trial

    # A reward may print: its output goes to stderr, because stdout is for the plan.
    with contextlib.redirect_stdout(sys.stderr), showing(), phase("measuring"):
        measured = from_run(run) if run else from_trial(lambda: read_recipe(path, overrides))
    layouts = layouts_of(recipe, measured, asked=Asked(**asked))
    found = predicted(recipe, measured, layouts=layouts)
    facts = [*shown(measured), *assumptions(layouts["asked"])]
    if recipe.rl.partial > 1:
        facts.append("rl.partial is not simulated: every completion is sampled in one piece")
    said = conclusion(layouts, found)
    if as_json:
        clusters = {
            name: {"layout": asdict(layouts[name]), "prediction": asdict(found[name])}
            for name in layouts
        }
        bottleneck = found["asked"].bottleneck
        given = {"clusters": clusters, "bottleneck": bottleneck, "conclusion": said}
        say_json({**given, "assumptions": facts})
    else:
        listed = Text("\n".join(f"· {fact}" for fact in facts), style="dim")
        Terminal().print(Group(render(layouts, found), listed, Text(f"\n{said}", style="bold")))


def render(layouts: Mapping[str, Layout], found: Mapping[str, Prediction]) -> Group:
    """What each cluster comes to, and where the time of the first goes."""
    from posttrain.distributed.plans.compared import seconds

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    columns = ("learners", "engines", "max_lag", "step", "samples/s", "learners idle")
    for name in (*columns, "engines idle"):
        table.add_column(name, justify="right")
    for name, layout in layouts.items():
        row, rate = found[name], found[name].samples_per_second
        table.add_row(
            str(layout.learners),
            str(layout.engines),
            str(layout.max_lag),
            seconds(row.step),
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            f"{row.learner_idle:.0%}",
            f"{row.engine_idle:.0%}",
            style="bold" if name == "asked" else "",
        )
    asked = found["asked"]
    parts = Text(
        f"80% of steps take {seconds(asked.fastest)} to {seconds(asked.slowest)}: sampling "
        f"{seconds(asked.sampling)} (engines {asked.engine_balance:.0%} balanced), "
        f"grading {seconds(asked.grading)}, learning {seconds(asked.training)} "
        f"(learners {asked.learner_balance:.0%} balanced), sync {seconds(asked.sync)}"
    )
    return Group(table, parts)
