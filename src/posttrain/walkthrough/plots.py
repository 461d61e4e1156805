"""The picture: mean reward above, loss below, one column for each delta."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.walkthrough.settings import Configuration

COLOURS = {"naive": "#0072b2", "unclipped": "#009e73", "clipped": "#d55e00"}
INK, GRID = "#333333", "#dddddd"
CAPTION = (
    "Loss is not progress. In supervised learning the data stands still and a lower loss is a "
    "better model; here every epoch samples new responses from the policy it has just changed, so "
    "two losses are averages over different data. Reward is what to watch."
)

Curves = Mapping[Configuration, tuple[Tensor, Tensor]]
"""For each configuration, its mean rewards [S, epochs] and its losses [S, steps]."""


def draw(curves: Curves, path: Path, *, reward: str = "inclusion_ordering") -> None:
    """Draw the runs of one reward function without KL.

    Rewards are means over seeds with a band of one standard deviation. Losses are medians with a
    band from the lower to the upper quartile: an unclipped ratio can reach hundreds on a token
    that was rare when it was sampled, and one such step would flatten every other curve.
    """
    # Without pyplot, which would choose a window system and keep the figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = {key: runs for key, runs in curves.items() if (key.reward, key.kl) == (reward, "off")}
    if not chosen:
        raise ValueError(
            f"curves: none has reward {reward!r} and no KL, so there is nothing to draw"
        )
    deltas = list(dict.fromkeys(key.delta for key in chosen))
    figure = Figure(figsize=(2.3 * len(deltas) + 0.6, 5.2), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(deltas), sharex=True, sharey="row", squeeze=False)
    for key, (rewards, losses) in chosen.items():
        above, below = axes[:, deltas.index(key.delta)]
        above.set_title(key.delta, fontsize=11, color=INK, fontweight="bold")
        below.set_xlabel("optimiser step", fontsize=9, color=INK)
        num_steps = losses.shape[1]
        _line(above, _mean_and_deviation(rewards), loss=key.loss, num_steps=num_steps)
        _line(below, _quartiles(losses), loss=key.loss, num_steps=num_steps)
        below.set_xticks([0, num_steps // 2, num_steps])
    for axis in axes.flat:
        _plain(axis)
    axes[0, 0].set_ylabel("mean reward", fontsize=10, color=INK)
    axes[1, 0].set_ylabel("loss", fontsize=10, color=INK)
    figure.align_ylabels(axes[:, 0])
    _words(figure, axes[0, 0], reward=reward, num_seeds=len(next(iter(chosen.values()))[0]))
    figure.savefig(path, dpi=110)


def _mean_and_deviation(values: Tensor) -> Tensor:
    """Mean − deviation, mean, mean + deviation over seeds. Shapes: [S, points] → [3, points]."""
    deviation, mean = torch.std_mean(values.double(), dim=0)
    return torch.stack([mean - deviation, mean, mean + deviation])


def _quartiles(values: Tensor) -> Tensor:
    """The quartiles over seeds. Shapes: [S, points] → [3, points]."""
    return values.double().quantile(torch.tensor([0.25, 0.5, 0.75]).double(), dim=0)


def _line(axis: Any, values: Tensor, *, loss: str, num_steps: int) -> None:
    """A line with its band; ``values`` [3, points] are the lower edge, the line, the upper edge."""
    num_points = values.shape[1]
    steps = [point * num_steps / num_points for point in range(num_points)]
    low, middle, high = values.tolist()
    axis.fill_between(steps, low, high, color=COLOURS[loss], alpha=0.1, linewidth=0)
    axis.plot(steps, middle, color=COLOURS[loss], linewidth=1.6, label=loss)


def _plain(axis: Any) -> None:
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=INK, length=0)
    axis.margins(x=0.01)
    axis.locator_params(axis="y", nbins=5)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)


def _words(figure: Any, first: Any, *, reward: str, num_seeds: int) -> None:
    """Title, legend and caption, with space for them."""
    width = figure.get_figwidth()
    figure.text(
        0.012,
        0.985,
        f"Learning to sort three numbers: reward {reward}, no KL, {num_seeds} seeds "
        "(reward: mean and one standard deviation; loss: median and quartiles)",
        fontsize=11,
        color=INK,
        va="top",
    )
    handles, labels = first.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.004, 0.955),
        ncols=len(labels),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
    )
    caption = textwrap.fill(CAPTION, int(width * 12.5))
    figure.text(0.012, 0.015, caption, fontsize=9.5, color=INK, va="bottom")
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, top=0.845, bottom=0.2, wspace=0.12, hspace=0.1
    )
