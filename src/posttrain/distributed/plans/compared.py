"""A cluster that is asked for, beside others that it could be: their layouts, and what to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from posttrain.config import Resolved, RlSection
from posttrain.distributed.engine_pool import ROUNDS
from posttrain.distributed.plans.measured import Measured, weight_moves
from posttrain.distributed.plans.simulate import Layout, Prediction, simulate
from posttrain.track.printable import counted

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


def layouts_of(recipe: Resolved, measured: Measured, *, asked: Asked) -> dict[str, Layout]:
    """The cluster that is asked for, as ``asked``, and what to compare it with."""
    cluster, rl = recipe.cluster, recipe.rl
    layout = Layout(
        learners=asked.learners or (cluster.learners if cluster else 1),
        engines=_given(asked.engines, cluster.engines if cluster else 0),
        max_lag=_given(asked.max_lag, rl.ahead),
        colocate=cluster is not None and cluster.colocate,
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
    return {"asked": layout, **others(layout)}


def predicted(
    recipe: Resolved, measured: Measured, *, layouts: Mapping[str, Layout]
) -> dict[str, Prediction]:
    """What each of them comes to, without completions longer than the recipe allows."""
    most = recipe.rl.max_new_tokens
    groups = [[min(length, most) for length in group] for group in measured.costs.groups]
    costs = replace(measured.costs, groups=groups)
    return {name: simulate(costs, layout) for name, layout in layouts.items()}


def _given(asked: int | None, otherwise: int) -> int:
    return otherwise if asked is None else asked


def _slots(rl: RlSection) -> int | None:
    """Sequences that an engine of the recipe decodes at once, where it says so."""
    found = rl.engine.get("max_sequences") if isinstance(rl.engine, Mapping) else None
    return found if isinstance(found, int) else None


def _tokens(rl: RlSection) -> float | None:
    return None if isinstance(rl.micro_batch_tokens, str) else rl.micro_batch_tokens


def others(layout: Layout) -> dict[str, Layout]:
    """More of one kind, the other way to run ahead, one process."""
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
    if layout.takes_turns and layout.max_lag:
        yield "sampling and learning share their devices: nothing but grading overlaps"
    yield "every engine and learner is as fast as the one that was measured; graders are shared"
    yield "evaluations, checkpoints and what is written after a step are not counted"


def named(layout: Layout) -> str:
    """A cluster in words."""
    if not layout.engines:
        where = (
            "one process"
            if layout.is_one_process
            else f"{layout.learners} learners, the driver samples"
        )
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
