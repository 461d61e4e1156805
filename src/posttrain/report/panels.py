"""The curves of a stage: which metrics are drawn, and what picture and page show of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.runs.metrics_file import Record
from posttrain.track.curves import ends

MARKERS_UP_TO = 25  # points of a curve
TICKS: dict[str, Any] = {"nbins": 4, "min_n_ticks": 3, "steps": [1, 2, 2.5, 5, 10]}
"""Where numbers stand beside a curve, for matplotlib's ``MaxNLocator``."""
_SMOOTH_FROM = 40  # points; fewer are shown as they are


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small picture of one metric; where it ``must_move``, all zeros are not worth drawing.

    ``held_out`` is the same measured on what is not learned from: a second curve beside the first.
    """

    title: str
    metric: str
    held_out: str = ""
    percent: bool = False
    must_move: bool = False


class Curve(NamedTuple):
    """A metric where it was logged and is a number; ``last`` is a mean of its last ``num`` values.

    A step is one noisy batch: the mean of the last few stands for it. A held-out number is of the
    same rows every time, and stands for itself.
    """

    steps: list[float]
    values: list[float]
    last: float
    num: int

    @property
    def smooth(self) -> list[float]:
        """The mean of the values around each, a twentieth of the curve wide; a short one as is."""
        values, reach = self.values, max(1, len(self.values) // 40)
        if len(values) < _SMOOTH_FROM:
            return values
        windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
        return [sum(window) / len(window) for window in windows]


class Drawn(NamedTuple):
    """A panel that has something to say, and its curves."""

    panel: Panel
    curve: Curve
    held_out: Curve | None


_HELD_OUT_REWARD = Panel(title="Held-out reward", metric="eval/reward")
HELD_OUT = (_HELD_OUT_REWARD,)  # the place of accuracy, or of what stands for it
_GRADIENT = Panel(title="Gradient norm", metric="train/gradient_norm")

# Places in the picture; each shows the first of its panels that has something to say.
RL: tuple[tuple[Panel, ...], ...] = (
    (Panel(title="Reward", metric="reward/mean"),),
    HELD_OUT,
    (Panel(title="Completion length (tokens)", metric="rollout/length"),),
    (Panel(title="Entropy (nats per token)", metric="objective/entropy"),),
    (
        Panel(title="KL to the reference (nats per sequence)", metric="objective/kl"),
        # With one optimiser step a batch, π is π_old, and this is 0.
        Panel(title="KL of one step (nats per token)", metric="policy/approx_kl", must_move=True),
        _GRADIENT,
    ),
    (
        Panel(title="Groups without signal", metric="rollout/groups_without_signal", percent=True),
        Panel(title="Variance explained by the critic", metric="value/explained_variance"),
    ),
)

SFT: tuple[tuple[Panel, ...], ...] = (
    (Panel(title="Loss (nats per token)", metric="loss/total", held_out="test/loss"),),
    HELD_OUT,
    (_GRADIENT,),
)

REWARD: tuple[tuple[Panel, ...], ...] = (
    (Panel(title="Loss (nats per set)", metric="loss/total"),),
    (Panel(title="Pairs in the right order", metric="preference/accuracy", percent=True),),
    (Panel(title="Margin of the preferred", metric="preference/margin"),),
)


def panels_of(records: Sequence[Record], *, accuracy_by: str = "") -> list[Drawn]:
    """The panels that these records, one a step, have something to say in, with their curves.

    The stage is recognised by what it logs: rewards, preferences, or neither (SFT).
    ``accuracy_by`` is the reward that checks answers.
    """
    logged = {name for record in records for name in record}
    rewarded = logged & {"reward/mean", "reward/invalid"}  # the first is not there if all broke
    places = RL if rewarded else REWARD if "preference/margin" in logged else SFT
    drawn: list[Drawn] = []
    for place in places:
        panels = _held_out(logged, accuracy_by) if place == HELD_OUT else place
        told = [
            Drawn(panel, curve, _curve(records, panel.held_out))
            for panel in panels
            if (curve := _curve(records, panel.metric))
            and (any(curve.values) or not panel.must_move)
        ]
        drawn += told if place == HELD_OUT else told[:1]
    return drawn


def _held_out(logged: set[str], accuracy_by: str) -> Sequence[Panel]:
    """Accuracy, else the full marks of each reward, else the reward."""
    if "eval/accuracy" in logged:
        title = f"Held-out accuracy ({accuracy_by})" if accuracy_by else "Held-out accuracy"
        return [Panel(title=title, metric="eval/accuracy", percent=True)]
    kind = "eval/full_marks/"
    full = {name: name.removeprefix(kind) for name in sorted(logged) if name.startswith(kind)}
    return [
        Panel(title=f"Held-out: full marks of {title}", metric=name, percent=True)
        for name, title in full.items()
    ] or HELD_OUT


def _curve(records: Sequence[Record], metric: str) -> Curve | None:
    logged = [record for record in records if math.isfinite(record.get(metric, math.nan))]
    steps, values = [r["step"] for r in logged], [r[metric] for r in logged]
    found = ends(values)
    if found is None or metric.startswith(("eval/", "test/")):
        return Curve(steps, values, values[-1], 1) if values else None
    return Curve(steps, values, found.last, found.num)


def end_note(records: Sequence[Record]) -> str:
    """Over what the numbers beside curves are means; empty where each is the last value."""
    found = ends([record["step"] for record in records if record["step"]])
    if found is None or found.num == 1:
        return ""
    return f"numbers: mean of the last {found.num} steps; held-out ones: the last evaluation"
