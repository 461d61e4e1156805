"""The picture of a calibration: points where the table says, shares below, and no empty picture."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from posttrain.algorithms.preferences import Bin
from posttrain.report.plot import plot_calibration

BLUE, PALE_BLUE = (0x25, 0x63, 0xB0), (0xB3, 0xC8, 0xE3)


def row(low: float, predicted: float, *, observed: float, count: int) -> Bin:
    return Bin(low=low, high=low + 0.1, predicted=predicted, observed=observed, count=count)


def pixels(bins: list[Bin], path: Path, *, colour: tuple[int, int, int]) -> np.ndarray:
    """[n, 2]: where this colour is in the picture, (down, right)."""
    plot_calibration(bins, path)
    picture = np.round(255 * imread(path)[..., :3])
    return np.argwhere(np.isclose(picture, colour, atol=2).all(-1))


def test_a_picture_is_written_whole_and_replaces_the_last(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "calibration.png"
    table = [row(0.2, 0.25, observed=0.3, count=40), row(0.7, 0.75, observed=0.7, count=40)]
    plot_calibration(table[:1], path)
    before = path.read_bytes()
    plot_calibration(table, str(path), title="Reward model")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.read_bytes() != before
    assert imread(path).shape[:2] == (810, 660)
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.png"]


def test_predictions_run_right_and_observations_up(tmp_path: Path) -> None:
    """A point drawn alone lies where two others, at known places, say that it must."""

    def place(predicted: float, observed: float) -> np.ndarray:
        table = [row(0.5, predicted, observed=observed, count=1)]
        return pixels(table, tmp_path / "a.png", colour=BLUE).mean(0)

    low, high = place(0.1, 0.1), place(0.9, 0.9)
    assert high[0] < low[0]  # up
    assert high[1] > low[1]  # right
    down, right = 0.1 + 0.8 * (place(0.75, 0.3) - low) / (high - low)
    assert (right, down) == (pytest.approx(0.75, abs=0.01), pytest.approx(0.3, abs=0.01))


def test_bars_stand_in_their_bins_and_are_as_high_as_their_shares(tmp_path: Path) -> None:
    table = [row(0.1, 0.15, observed=0.1, count=30), row(0.8, 0.85, observed=0.9, count=10)]
    bars = pixels(table, tmp_path / "a.png", colour=PALE_BLUE)
    bars = bars[bars[:, 0] > 600]  # the points are above, and their edges are pale too
    left, right = bars[bars[:, 1] < 330], bars[bars[:, 1] > 330]
    assert len(left) / len(right) == pytest.approx(3.0, rel=0.05)
    width = np.ptp(left[:, 1]) / 0.9  # of a bin; from the first bar to the second are seven
    assert (right[:, 1].mean() - left[:, 1].mean()) / width == pytest.approx(7.0, rel=0.05)
    point = pixels(table[:1], tmp_path / "b.png", colour=BLUE)  # in the middle of its bin
    assert point[:, 1].mean() == pytest.approx(left[:, 1].mean(), abs=2)


def test_a_title_is_text_and_not_mathematics(tmp_path: Path) -> None:
    table = [row(0.5, 0.5, observed=0.5, count=1)]
    plot_calibration(table, tmp_path / "a.png", title=r"$\frac{1$ \x1b and \badcommand{")
    plot_calibration(table, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("table", [[], [row(0.5, 0.5, observed=0.5, count=0)]])
def test_nothing_to_draw_is_refused_and_leaves_no_file(table: list[Bin], tmp_path: Path) -> None:
    message = (
        "bins: nothing to draw; make them with preferences.pair_calibration from at least one "
        "held-out pair"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plot_calibration(table, tmp_path / "calibration.png")
    assert not list(tmp_path.iterdir())
