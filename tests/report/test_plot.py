"""The picture of a run: something is drawn for everything that was logged, and nothing acts."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from posttrain.report import plot_curves
from posttrain.report.plot import RL, Curve, panels_of


def records(num_steps: int, *names: str) -> list[dict[str, float]]:
    return [
        {"step": step} | {name: 0.5 + math.sin(step + i) / 2 for i, name in enumerate(names)}
        for step in range(num_steps)
    ]


def inked(path: Path) -> float:
    """Share of pixels that are not white."""
    return float(np.mean((imread(path)[..., :3] < 0.98).any(axis=-1)))


RL_NAMES = [panels[0].metric for panels in RL]


@pytest.mark.parametrize("num_steps", [1, 200])
def test_all_panels_are_drawn_from_few_and_from_many_points(num_steps: int, tmp_path: Path) -> None:
    plot_curves(records(num_steps, *RL_NAMES), tmp_path / "curves.png", title="a run")
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[:2] == (802, 1620)
    thirds = [pixels[:, start : start + 540, :3] for start in (0, 540, 1080)]
    halves = [half for third in thirds for half in (third[:400], third[400:])]
    blue = [np.isclose(half, [0.145, 0.388, 0.690], atol=0.01).all(-1).sum() for half in halves]
    assert min(blue) > 20  # a line, or the mark of a single point, in each of the six


def test_panels_without_metrics_leave_no_hole(tmp_path: Path) -> None:
    plot_curves(records(5, "reward/mean", "rollout/length"), tmp_path / "two.png")
    assert imread(tmp_path / "two.png").shape[1] == 2 * 540
    plot_curves(records(5, *RL_NAMES[:4]), tmp_path / "four.png")
    assert imread(tmp_path / "four.png").shape[1] == 3 * 540


@pytest.mark.parametrize(
    ("logged", "title"),
    [
        ({"policy/approx_kl": 0.1, "objective/kl": 0.0, "train/gradient_norm": 1.0}, "KL to the"),
        ({"policy/approx_kl": 0.1, "train/gradient_norm": 1.0}, "KL of one step"),
        ({"policy/approx_kl": 0.0, "train/gradient_norm": 1.0}, "Gradient norm"),
    ],
)
def test_a_place_shows_the_first_metric_that_says_something(
    logged: dict[str, float], title: str
) -> None:
    _, drawn = panels_of([{"step": 1, "reward/mean": 0.0, **logged}])
    assert drawn.panel.title.startswith(title)


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    broken = [{"step": 0, "reward/mean": math.nan, "rollout/length": math.inf}]
    plot_curves(broken, tmp_path / "none.png")
    plot_curves([*broken, {"step": 1, "reward/mean": 0.5}], tmp_path / "one.png")
    assert 0 < inked(tmp_path / "none.png") < inked(tmp_path / "one.png")


def test_a_supervised_stage_shows_its_loss(tmp_path: Path) -> None:
    plot_curves(records(50, "loss/total", "train/gradient_norm"), tmp_path / "sft.png")
    assert imread(tmp_path / "sft.png").shape[1] == 2 * 540


def test_a_held_out_loss_is_drawn_beside_the_loss(tmp_path: Path) -> None:
    """In its own colour, in the same panel; one evaluation is a dot, none is nothing."""

    def orange(name: str, records: list[dict[str, float]]) -> int:
        plot_curves(records, tmp_path / name)
        pixels = imread(tmp_path / name)
        assert pixels.shape[1] == 540
        return int(np.isclose(pixels[..., :3], [0.706, 0.325, 0.035], atol=0.01).all(-1).sum())

    losses = records(50, "loss/total")
    counts = [
        orange(f"{number}.png", [*losses, *({"step": s, "test/loss": 0.4} for s in steps)])
        for number, steps in enumerate(([], [0], [0, 25, 49]))
    ]
    assert counts[0] == 0 < 20 < counts[1] < counts[2]


def test_nothing_logged_is_still_a_picture(tmp_path: Path) -> None:
    plot_curves([], tmp_path / "empty.png", title="empty")
    assert inked(tmp_path / "empty.png") > 0.001


def test_a_title_is_text_and_not_mathematics(tmp_path: Path) -> None:
    plot_curves([], tmp_path / "a.png", title=r"$\frac{1$ \x1b and \badcommand{")


def test_smoothing_keeps_the_mean_of_a_line_and_short_curves() -> None:
    def smoothed(values: list[float]) -> list[float]:
        return Curve(list(range(len(values))), values, values[-1], 1).smooth

    line = [0.5 * step for step in range(200)]
    smooth = smoothed(line)
    assert smooth[100] == pytest.approx(line[100], rel=1e-12)
    noisy = [(-1.0) ** step for step in range(200)]
    assert max(map(abs, smoothed(noisy))) < 0.4
    assert smoothed(line[:39]) == line[:39]
