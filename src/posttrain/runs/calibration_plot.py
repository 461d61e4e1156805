"""How far a reward model may be believed: what it predicts against what people chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.algorithms.preferences import Bin, calibration_error
from posttrain.runs.files import replacing
from posttrain.track.text import printable

_INK, _GREY, _FAINT = "#222222", "#767676", "#e6e6e6"
_BLUE, _PALE_BLUE = "#2563b0", "#b3c8e3"
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def plot_calibration(bins: Sequence[Bin], path: str | Path, *, title: str = "") -> None:
    """Draw a reliability table into a PNG: the observed rate over the predicted one, bin by bin.

    On the diagonal the model is right about itself. Below are the shares of predictions, for a bin
    that few fall into is a noisy point. ``bins`` come from ``preferences.pair_calibration``.
    """
    # Not pyplot: it keeps every figure alive and chooses a backend by the environment.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    total = sum(row.count for row in bins)
    if total == 0:
        raise ValueError(
            "bins: nothing to draw; make them with preferences.pair_calibration from at least one "
            "held-out pair"
        )
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, hspace=0.04)
    figure = Figure(figsize=(4.4, 5.4), layout=layout)
    FigureCanvasAgg(figure)
    if title:
        style = {"fontsize": 12, "weight": "bold", "color": _INK}
        figure.suptitle(printable(title), x=0.03, ha="left", parse_math=False, **style)
    rates, shares = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_rates(rates, bins)
    _draw_shares(shares, bins, total=total)
    with replacing(Path(path)) as beside:
        figure.savefig(beside, format="png", dpi=150, facecolor="white")


def _draw_rates(axis: Any, bins: Sequence[Bin]) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.plot([0, 1], [0, 1], color=_GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    axis.plot(
        [row.predicted for row in bins],
        [row.observed for row in bins],
        color=_BLUE,
        linewidth=1.8,
        marker="o",
        markersize=5,
        clip_on=False,
        zorder=3,
    )
    note = f"expected calibration error {calibration_error(bins):.1%}   (dashed: none)"
    axis.set_title(note, loc="left", fontsize=9.5, color=_INK)
    axis.set_xlim(-0.02, 1.02)
    axis.set_ylim(-0.02, 1.02)
    axis.set_xticks(_TICKS)
    axis.set_yticks(_TICKS)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_ylabel("observed preference rate", fontsize=9, color=_INK)
    axis.grid(color=_FAINT, linewidth=0.8)
    _tidy(axis)


def _draw_shares(axis: Any, bins: Sequence[Bin], *, total: int) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axis.bar(
        [(row.low + row.high) / 2 for row in bins],
        [row.count / total for row in bins],
        width=[0.9 * (row.high - row.low) for row in bins],
        color=_PALE_BLUE,
    )
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=2, min_n_ticks=2))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("predicted preference rate", fontsize=9, color=_INK)
    axis.set_ylabel("share of pairs", fontsize=9, color=_INK)
    axis.grid(axis="y", color=_FAINT, linewidth=0.8)
    _tidy(axis)


def _tidy(axis: Any) -> None:
    axis.tick_params(labelsize=8, length=0, colors=_GREY)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)
