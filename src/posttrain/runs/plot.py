"""The curves of a run as small multiples: one question each, read from the last point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.runs.files import replacing
from posttrain.runs.metrics import Record, merge_steps
from posttrain.track.curves import ends
from posttrain.track.text import printable

_INK, _GREY, _FAINT, _BLUE, _ORANGE = "#222222", "#767676", "#e6e6e6", "#2563b0", "#b45309"
_SMOOTH_FROM = 40  # points; fewer are shown as they are
_MARKERS_UP_TO = 25


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


_HELD_OUT_REWARD = Panel(title="Held-out reward", metric="eval/reward")
HELD_OUT = (_HELD_OUT_REWARD,)  # the place of accuracy, or of what stands for it
_NO_SIGNAL = "rollout/groups_without_signal"
_GRADIENT = Panel(title="Gradient norm", metric="train/gradient_norm")
_KL_REFERENCE = Panel(title="KL to the reference (nats per sequence)", metric="objective/kl")
_KL_STEP = Panel(
    title="KL of one step (nats per token)",
    metric="policy/approx_kl",
    must_move=True,  # one optimiser step a batch: π is π_old, and this is 0
)

# Places in the picture; each shows the first of its panels that has something to say.
RL: tuple[tuple[Panel, ...], ...] = (
    (Panel(title="Reward", metric="reward/mean"),),
    HELD_OUT,
    (Panel(title="Completion length (tokens)", metric="rollout/length"),),
    (Panel(title="Entropy (nats per token)", metric="objective/entropy"),),
    (_KL_REFERENCE, _KL_STEP, _GRADIENT),
    (
        Panel(title="Groups without signal", metric=_NO_SIGNAL, percent=True),
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


def plot_curves(
    metrics: Iterable[Mapping[str, float]],
    path: str | Path,
    *,
    title: str = "",
    accuracy_by: str = "",
) -> None:
    """Draw the curves of a stage into a PNG; panels whose metrics were never logged are left out.

    The stage is recognised by what it logs: rewards, preferences, or neither (SFT).
    A long curve is shown faintly, with its running mean in full colour; the number beside its end
    is that of :func:`last_value`. ``accuracy_by`` is the reward that checks answers.
    """
    # Not pyplot: it keeps every figure alive and chooses a backend by the environment.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = merge_steps(metrics)
    panels = panels_of(records, accuracy_by=accuracy_by)
    num_columns = min(3, max(1, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    size = (3.6 * num_columns, 2.5 * num_rows + 0.35)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1))
    FigureCanvasAgg(figure)
    if title:
        style = {"fontsize": 12, "weight": "bold", "color": _INK}
        figure.suptitle(printable(title), x=0.02, ha="left", parse_math=False, **style)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for index, axis in enumerate(axes):
        if index >= len(panels):
            axis.set_axis_off()
            continue
        _draw(axis, panels[index], records=records)
        axis.set_xlim(*_limits(records))
        if index + num_columns >= len(panels):
            axis.set_xlabel("step", fontsize=8, color=_GREY)
    over = end_note(records)
    if over:
        style = {"fontsize": 7, "color": _GREY}
        figure.supxlabel(over, x=0.99, ha="right", **style)
    if not panels:
        axis.text(0.5, 0.5, "nothing to draw yet", ha="center", color=_GREY)
    with replacing(Path(path)) as beside:
        figure.savefig(beside, format="png", dpi=150, facecolor="white")


def panels_of(records: Sequence[Record], *, accuracy_by: str = "") -> list[Panel]:
    """The panels that these records, one a step, have something to say in."""
    logged = {name for record in records for name in record}
    rewarded = logged & {"reward/mean", "reward/invalid"}  # the first is not there if all broke
    places = RL if rewarded else REWARD if "preference/margin" in logged else SFT
    panels: list[Panel] = []
    for place in places:
        if place == HELD_OUT:
            panels += _held_out(logged, accuracy_by)
        else:
            panels += [panel for panel in place if _says_something(records, panel)][:1]
    return panels


def _held_out(logged: set[str], accuracy_by: str) -> list[Panel]:
    """Accuracy, else the full marks of each reward, else the reward."""
    if "eval/accuracy" in logged:
        title = f"Held-out accuracy ({accuracy_by})" if accuracy_by else "Held-out accuracy"
        return [Panel(title=title, metric="eval/accuracy", percent=True)]
    full = sorted(name for name in logged if name.startswith("eval/full_marks/"))
    if full:
        titles = {name: name.removeprefix("eval/full_marks/") for name in full}
        return [
            Panel(title=f"Held-out: full marks of {title}", metric=name, percent=True)
            for name, title in titles.items()
        ]
    return [_HELD_OUT_REWARD] if "eval/reward" in logged else []


def last_value(records: Sequence[Record], metric: str) -> tuple[float, int]:
    """The number at the end of a curve, and over how many values it is a mean.

    A step is one noisy batch: the mean of the last few stands for it. A held-out number is of the
    same rows every time, and stands for itself.
    """
    _, values = curve_points(records, metric)
    found = None if metric.startswith(("eval/", "test/")) else ends(values)
    return (values[-1], 1) if found is None else (found.last, found.num)


def end_note(records: Sequence[Record]) -> str:
    """Over what the numbers beside curves are means; empty where each is the last value."""
    found = ends([record["step"] for record in records if record["step"]])
    if found is None or found.num == 1:
        return ""
    return f"numbers: mean of the last {found.num} steps; held-out ones: the last evaluation"


def _says_something(records: Sequence[Record], panel: Panel) -> bool:
    _, values = curve_points(records, panel.metric)
    return any(values) if panel.must_move else bool(values)


def _draw(axis: Any, panel: Panel, *, records: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    _draw_curve(axis, panel.metric, records=records, percent=panel.percent)
    if panel.held_out and curve_points(records, panel.held_out)[0]:
        options = {"color": _ORANGE, "label": "held-out "}
        _draw_curve(axis, panel.held_out, records=records, percent=panel.percent, **options)
    title = printable(panel.title, limit=44)
    axis.set_title(title, loc="left", fontsize=9.5, color=_INK, parse_math=False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if panel.percent:
        axis.set_ylim(-0.03, 1.03)
        axis.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.tick_params(labelsize=8, length=0, colors=_GREY)
    axis.grid(axis="y", color=_FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)


def _draw_curve(
    axis: Any,
    metric: str,
    *,
    records: Sequence[Record],
    percent: bool,
    color: str = _BLUE,
    label: str = "",
) -> None:
    steps, values = curve_points(records, metric)
    last, _ = last_value(records, metric)
    smooth = smoothed(values)
    if smooth != values:
        axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    marker = "o" if len(steps) <= _MARKERS_UP_TO else None
    axis.plot(steps, smooth, color=color, linewidth=1.8, marker=marker, markersize=3.5)
    axis.annotate(
        label + (f"{last:.0%}" if percent else f"{last:.3g}"),
        (steps[-1], last),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=color,
        annotation_clip=False,
    )


def curve_points(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged and is a number."""
    kept = [
        (record["step"], record[name])
        for record in records
        if name in record and math.isfinite(record[name])
    ]
    return [step for step, _ in kept], [value for _, value in kept]


def _limits(records: Sequence[Record]) -> tuple[float, float]:
    """The range of steps that all panels share, with room for the mark of the last point."""
    first, last = records[0]["step"], records[-1]["step"]
    room = 0.03 * (last - first) or 1.0
    return first - room, last + room


def smoothed(values: list[float]) -> list[float]:
    """The mean of the values around each, a twentieth of the curve wide; short curves as they are.

    >>> smoothed([1.0, 5.0])
    [1.0, 5.0]
    """
    if len(values) < _SMOOTH_FROM:
        return values
    reach = max(1, len(values) // 40)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
