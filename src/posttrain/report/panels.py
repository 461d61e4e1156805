"""The curves of a stage: which metrics are drawn, and what picture and page show of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.runs.metrics_file import Record
from posttrain.track.curves import ends

MARKERS_UP_TO = 25  # points of a curve up to which each has a marker
TICKS: dict[str, Any] = {"nbins": 4, "min_n_ticks": 3, "steps": [1, 2, 2.5, 5, 10]}
"""Steps between ticks, for matplotlib's ``MaxNLocator``."""
_SMOOTH_FROM = 40  # points from which a curve is smoothed


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A small plot of one metric; with ``must_move`` it is left out where all values are 0.

    ``held_out`` is the same metric on held-out rows, drawn as a second curve.
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


class DrawnPanel(NamedTuple):
    """A panel whose metric was logged, with its curves."""

    panel: Panel
    curve: Curve
    held_out: Curve | None


_HELD_OUT_REWARD = Panel(title="Held-out reward", metric="eval/reward")
HELD_OUT = (_HELD_OUT_REWARD,)  # replaced by accuracy, or shares with full marks, if logged
_GRADIENT = Panel(title="Gradient norm", metric="train/gradient_norm")

# Rows of alternatives: of each tuple, the first panel whose metric was logged is drawn.
RL: tuple[tuple[Panel, ...], ...] = (
    (Panel(title="Reward", metric="reward/mean"),),
    HELD_OUT,
    (Panel(title="Completion length (tokens)", metric="rollout/length"),),
    (Panel(title="Entropy (nats per token)", metric="objective/entropy"),),
    (
        Panel(title="KL to the reference (nats per sequence)", metric="objective/kl"),
        # With one optimiser step a batch, π is π_old, and this KL is 0.
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
    (Panel(title="Loss (nats per set)", metric="loss/total", held_out="test/loss"),),
    (
        Panel(
            title="Pairs in the right order",
            metric="preference/accuracy",
            held_out="test/accuracy",
            percent=True,
        ),
    ),
    (Panel(title="Margin of the preferred", metric="preference/margin", held_out="test/margin"),),
)


def panels_of(records: Sequence[Record], *, accuracy_by: str = "") -> list[DrawnPanel]:
    """The panels whose metrics are in these records, one record a step, with their curves.

    The stage is recognised by what it logs: rewards, preferences, or neither (SFT).
    ``accuracy_by`` is the reward that checks answers.
    """
    logged = {name for record in records for name in record}
    rewarded = logged & {"reward/mean", "reward/invalid"}  # if all scores broke, no reward/mean
    slots = RL if rewarded else REWARD if "preference/margin" in logged else SFT
    drawn: list[DrawnPanel] = []
    for slot in slots:
        panels = _held_out(logged, accuracy_by) if slot == HELD_OUT else slot
        found = [
            DrawnPanel(panel, curve, _curve(records, panel.held_out))
            for panel in panels
            if (curve := _curve(records, panel.metric))
            and (any(curve.values) or not panel.must_move)
        ]
        drawn += found if slot == HELD_OUT else found[:1]
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
    """A note on the steps that the numbers beside curves average; empty for the last value."""
    found = ends([record["step"] for record in records if record["step"]])
    if found is None or found.num == 1:
        return ""
    return f"numbers: mean of the last {found.num} steps; held-out ones: the last evaluation"
