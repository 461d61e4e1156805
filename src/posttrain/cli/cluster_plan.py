"""``posttrain plan``: what a cluster would come to, as a table, or as JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from posttrain.cli.loading import loading
from posttrain.config import RlSection, read_recipe, resolve
from posttrain.distributed.plans.simulate import Costs, Layout, Prediction, simulate
from posttrain.track.printable import counted
from posttrain.track.progress import phase, showing
from posttrain.track.safe_terminal import Terminal, say_json

if TYPE_CHECKING:
    from posttrain.distributed.plans.measured import Measured

CALL = 0.002  # seconds of a call to an actor of Ray with 64 prompts of 200 tokens, as measured
WORTH = 1.05  # times as fast that a larger cluster must be to be recommended


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command line; None is what the recipe says."""

    learners: int | None
    engines: int | None
    max_lag: int | None
    bandwidth: float
    learner_bandwidth: float


def plan_recipe(arguments: Sequence[str], asked: Asked, *, run: Path | None, as_json: bool) -> None:
    """Predict the steps of a recipe on a cluster, and print them beside those of others."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError("plan: name the recipe first: posttrain plan RECIPE.toml --learners 8")
    path, *overrides = arguments
    recipe = resolve(read_recipe(path, overrides))
    if "rl" not in recipe.stages:
        raise ValueError(f"plan: {path} has no stage rl, and nothing else samples beside learning")
    with loading():
        from posttrain.distributed.engine_pool import ROUNDS
        from posttrain.distributed.plans.measured import shown, weight_moves
        from posttrain.distributed.plans.run_costs import from_run
        from posttrain.distributed.plans.trial_costs import from_trial

    # A reward may print: its output goes to stderr, because stdout is for the plan.
    with contextlib.redirect_stdout(sys.stderr), showing(), phase("measuring"):
        measured = from_run(run) if run else from_trial(lambda: read_recipe(path, overrides))
    cluster, rl = recipe.cluster, recipe.rl
    layout = Layout(
        learners=asked.learners or (cluster.learners if cluster else 1),
        engines=_given(asked.engines, cluster.engines if cluster else 0),
        max_lag=_given(asked.max_lag, rl.max_lag),
        prompts_per_step=rl.prompts_per_step,
        group_size=rl.group_size,
        bandwidth=asked.bandwidth,
        learner_bandwidth=asked.learner_bandwidth,
        call=CALL,
        rounds=ROUNDS,
        slots=_slots(rl),
        moves=weight_moves(rl),
        minibatches=rl.minibatches,
        micro_batch_tokens=_tokens(rl),
        useful=measured.useful,
        max_resamples=(rl.max_resamples or 0) if rl.dynamic_sampling else 0,
    )
    costs = _limited(measured, rl)
    layouts = {"asked": layout, **others(layout)}
    found = {name: simulate(costs, each) for name, each in layouts.items()}
    facts = [*shown(measured), *assumptions(layout)]
    if as_json:
        say_json(
            {
                "clusters": {
                    name: {"layout": asdict(layouts[name]), "prediction": asdict(found[name])}
                    for name in layouts
                },
                "bottleneck": found["asked"].bottleneck,
                "conclusion": conclusion(layouts, found),
                "assumptions": facts,
            }
        )
    else:
        Terminal().print(render(layouts, found, facts=facts))


def _given(asked: int | None, otherwise: int) -> int:
    return otherwise if asked is None else asked


def _slots(rl: RlSection) -> int | None:
    """Sequences that an engine of the recipe decodes at once, where it says so."""
    found = rl.engine.get("max_sequences") if isinstance(rl.engine, Mapping) else None
    return found if isinstance(found, int) else None


def _tokens(rl: RlSection) -> float | None:
    return None if isinstance(rl.micro_batch_tokens, str) else rl.micro_batch_tokens


def _limited(measured: Measured, rl: RlSection) -> Costs:
    """The costs, without completions longer than the recipe allows."""
    groups = [[min(length, rl.max_new_tokens) for length in g] for g in measured.costs.groups]
    return replace(measured.costs, groups=groups)


def others(layout: Layout) -> dict[str, Layout]:
    """What to compare a cluster with: more of one kind, the other way to run ahead, one process."""
    return {
        "engines": replace(layout, engines=2 * layout.engines or 1),
        "learners": replace(layout, learners=2 * layout.learners),
        "lag": replace(layout, max_lag=0 if layout.max_lag else 1),
        "alone": replace(layout, learners=1, engines=0, max_lag=0),
    }


def assumptions(layout: Layout) -> Iterator[str]:
    """What is taken for granted, and would change the numbers if it were not so."""
    if layout.engines:
        yield f"weights go to all engines at once, {layout.bandwidth / 1e9:.3g} GB/s to each"
        yield (
            f"a batch goes to engines in pieces, {layout.rounds} for each, {seconds(layout.call)} "
            "for the call"
        )
    if layout.learners > 1:
        yield (
            f"FSDP moves all weights {layout.moves} times for a micro-batch, "
            f"{layout.learner_bandwidth / 1e9:.3g} GB/s for each learner, none of it hidden behind "
            "arithmetic; what a step costs whatever its tokens is not divided"
        )
    if layout.micro_batch_tokens is None and layout.learners > 1:
        yield "a learner's share of a mini-batch is one micro-batch"
    yield "every engine and learner is as fast as the one that was measured; graders are shared"
    yield "evaluations, checkpoints and what is written after a step are not counted"


def render(
    layouts: Mapping[str, Layout], found: Mapping[str, Prediction], *, facts: Sequence[str]
) -> Group:
    """The plan for a terminal."""
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
        f"80 % of steps take {seconds(asked.fastest)} to {seconds(asked.slowest)}: sampling "
        f"{seconds(asked.sampling)} (engines {asked.engine_balance:.0%} balanced), "
        f"grading {seconds(asked.grading)}, learning {seconds(asked.training)} "
        f"(learners {asked.learner_balance:.0%} balanced), sync {seconds(asked.sync)}"
    )
    listed = Text("\n".join(f"· {fact}" for fact in facts), style="dim")
    said = Text(f"\n{conclusion(layouts, found)}", style="bold")
    return Group(table, parts, listed, said)


def named(layout: Layout) -> str:
    """A cluster in words."""
    if not layout.engines:
        one = layout.learners == 1
        where = "one process" if one else f"{layout.learners} learners, of which one samples"
    else:
        engines, learners = counted(layout.engines, "engine"), counted(layout.learners, "learner")
        where = f"{learners}, {engines}"
    return f"{where}, max_lag {layout.max_lag}"


def conclusion(layouts: Mapping[str, Layout], found: Mapping[str, Prediction]) -> str:
    """What holds the cluster up, and what would help most."""
    asked = found["asked"]
    said = f"{named(layouts['asked'])}: {seconds(asked.step)} a step. "
    if asked.bottleneck == "sync":
        said += f"Bringing weights to the engines ({seconds(asked.sync)}) takes longest"
    elif asked.bottleneck == "training":
        said += (
            f"A batch takes longer to learn ({seconds(asked.training)}) than to make "
            f"({seconds(asked.making)})"
        )
    else:
        said += (
            f"A batch takes longer to make ({seconds(asked.making)}, most of it "
            f"{asked.bottleneck}) than to learn ({seconds(asked.training)})"
        )
    gains = {name: asked.step / found[name].step for name in ("engines", "learners", "lag")}
    best = max(gains, key=lambda name: gains[name])
    if gains[best] >= WORTH:
        return f"{said}; {named(layouts[best])} would be {gains[best]:.3g} times as fast."
    end = "twice the engines or learners would change little"
    if asked.bottleneck == "grading":
        end += ", more grading.workers might"
    return f"{said}; {end}."


def seconds(value: float) -> str:
    """A time as short as it can be read.

    >>> seconds(0.0123), seconds(3.456), seconds(300)
    ('12.3 ms', '3.46 s', '5 min')
    """
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"
