"""The pictures of a run: its curves as small multiples, and the calibration of a reward model.

The panels are data: which metrics, how scaled, and what is said about them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.runs.files import replacing
from posttrain.runs.metrics_file import Record, merge_steps
from posttrain.track.printable import printable
from posttrain.track.shown import ends

if TYPE_CHECKING:
    from posttrain.algorithms.preferences import Bin


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


_INK, _GREY, _FAINT = "#222222", "#767676", "#e6e6e6"
_BLUE, _PALE_BLUE, _ORANGE = "#2563b0", "#b3c8e3", "#b45309"
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def plot_curves(
    metrics: Iterable[Mapping[str, float]],
    path: str | Path,
    *,
    title: str = "",
    accuracy_by: str = "",
) -> None:
    """Draw the curves of a stage into a PNG; panels whose metrics were never logged are left out.

    A long curve is shown faintly, with its running mean in full colour. ``accuracy_by`` is the
    reward that checks answers.
    """
    records = merge_steps(metrics)
    panels = panels_of(records, accuracy_by=accuracy_by)
    num_columns = min(3, max(1, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    size = (3.6 * num_columns, 2.5 * num_rows + 0.35)
    with _picture(path, size=size, title=title, w_pad=0.14, h_pad=0.1) as figure:
        axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
        for index, axis in enumerate(axes):
            if index >= len(panels):
                axis.set_axis_off()
                continue
            _draw(axis, panels[index], records=records)
            if index + num_columns >= len(panels):
                axis.set_xlabel("step", fontsize=8, color=_GREY)
        if over := end_note(records):
            figure.supxlabel(over, x=0.99, ha="right", fontsize=7, color=_GREY)
        if not panels:
            axis.text(0.5, 0.5, "nothing to draw yet", ha="center", color=_GREY)


@contextmanager
def _picture(
    path: str | Path, *, size: tuple[float, float], title: str, **spaces: Any
) -> Iterator[Any]:
    """A figure to draw in; its file is replaced as a whole at the end."""
    # Without pyplot, which keeps every figure alive and picks a backend from the environment.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(**spaces))
    if title:
        style = {"fontsize": 12, "weight": "bold", "color": _INK}
        figure.suptitle(printable(title), x=0.02, ha="left", parse_math=False, **style)
    yield figure
    with replacing(Path(path)) as beside:
        figure.savefig(beside, format="png", dpi=150, facecolor="white")


def _draw(axis: Any, drawn: DrawnPanel, *, records: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    panel = drawn.panel
    _draw_curve(axis, drawn.curve, percent=panel.percent)
    if drawn.held_out is not None:
        options = {"color": _ORANGE, "label": "held-out "}
        _draw_curve(axis, drawn.held_out, percent=panel.percent, **options)
    title = printable(panel.title, limit=44)
    axis.set_title(title, loc="left", fontsize=9.5, color=_INK, parse_math=False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    first, last = records[0]["step"], records[-1]["step"]  # all panels share the range of steps
    margin = 0.03 * (last - first) or 1.0  # so that the marker of the last point is not cut
    axis.set_xlim(first - margin, last + margin)
    if panel.percent:
        axis.set_ylim(-0.03, 1.03)
        axis.set_yticks(_QUARTERS)
        _in_percent(axis.yaxis)
    else:
        axis.yaxis.set_major_locator(MaxNLocator(**TICKS))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(axis="y", color=_FAINT, linewidth=0.8)
    _tidy(axis)


def _draw_curve(
    axis: Any, curve: Curve, *, percent: bool, color: str = _BLUE, label: str = ""
) -> None:
    steps, values, last, _ = curve
    smooth = curve.smooth
    if smooth != values:
        axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    marker = "o" if len(steps) <= MARKERS_UP_TO else None
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


def plot_calibration(bins: Sequence[Bin], path: str | Path, *, title: str = "") -> None:
    """Draw a reliability table into a PNG: the observed rate over the predicted one, bin by bin.

    On the diagonal the model is calibrated. The lower plot shows the share of predictions in each
    bin, because bins with few of them are noisy. ``bins`` come from
    ``preferences.pair_calibration``.
    """
    total = sum(row.count for row in bins)
    if total == 0:
        raise ValueError(
            "bins: nothing to draw; make them with preferences.pair_calibration from at least one "
            "held-out pair"
        )
    spaces = {"w_pad": 0.12, "h_pad": 0.08, "hspace": 0.04}
    with _picture(path, size=(4.4, 5.4), title=title, **spaces) as figure:
        rates, shares = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_rates(rates, bins)
        _draw_shares(shares, bins, total=total)


def _draw_rates(axis: Any, bins: Sequence[Bin]) -> None:
    axis.plot([0, 1], [0, 1], color=_GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    predicted, observed = [row.predicted for row in bins], [row.observed for row in bins]
    style = {"color": _BLUE, "linewidth": 1.8, "marker": "o", "markersize": 5}
    axis.plot(predicted, observed, clip_on=False, zorder=3, **style)
    from posttrain.algorithms.preferences import calibration_error  # it loads torch

    note = f"expected calibration error {calibration_error(bins):.1%}   (dashed: none)"
    axis.set_title(note, loc="left", fontsize=9.5, color=_INK)
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=_QUARTERS, yticks=_QUARTERS)
    _in_percent(axis.yaxis)
    axis.set_ylabel("observed preference rate", fontsize=9, color=_INK)
    axis.grid(color=_FAINT, linewidth=0.8)
    _tidy(axis)


def _draw_shares(axis: Any, bins: Sequence[Bin], *, total: int) -> None:
    from matplotlib.ticker import MaxNLocator

    middles = [(row.low + row.high) / 2 for row in bins]
    widths = [0.9 * (row.high - row.low) for row in bins]
    axis.bar(middles, [row.count / total for row in bins], width=widths, color=_PALE_BLUE)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=2, min_n_ticks=2))
    for side in (axis.xaxis, axis.yaxis):
        _in_percent(side)
    axis.set_xlabel("predicted preference rate", fontsize=9, color=_INK)
    axis.set_ylabel("share of pairs", fontsize=9, color=_INK)
    axis.grid(axis="y", color=_FAINT, linewidth=0.8)
    _tidy(axis)


def _in_percent(side: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    side.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _tidy(axis: Any) -> None:
    axis.tick_params(labelsize=8, length=0, colors=_GREY)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)
