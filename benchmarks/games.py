"""Curves of the games, of which docs/images/games.png is made: held-out games over steps.

    for seed in 1 2 3; do
        posttrain run recipes/guess_number.toml --run.seed $seed --run.folder runs/guess_$seed
    done
    python benchmarks/games.py --guess-number runs/guess_?
    python benchmarks/games.py --tic-tac-toe runs/tic_? --out docs/images/tic_tac_toe.png

A thin line is a seed, the thick one their mean, over the greedy games of each evaluation. A game of
which no runs are named is left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from posttrain.runs import merge_steps, read_metrics

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "games.png"
PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "guess_number": ("Guess a number of a range within 1 to 9", {"found in time": "found"}),
    "tic_tac_toe": (
        "Tic-tac-toe against random moves",
        {"won": "win", "drawn": "draw", "lost": "loss"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for game in PANELS:
        parser.add_argument(f"--{game.replace('_', '-')}", nargs="+", default=[], type=Path)
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = vars(parser.parse_args())
    shown = [game for game in PANELS if arguments[game]]
    if not shown:
        parser.error("name the run folders of a game")
    size = (4.6 * len(shown), 3.4)
    figure, axes = plt.subplots(1, len(shown), figsize=size, sharey=True, squeeze=False)
    for axis, game in zip(axes[0], shown, strict=True):
        title, outcomes = PANELS[game]
        draw(axis, [curves(folder, outcomes) for folder in arguments[game]], title=title)
    axes[0][0].set_ylabel("share of held-out games")
    figure.tight_layout()
    figure.savefig(arguments["out"], dpi=120, metadata={"Software": None})


def curves(folder: Path, outcomes: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """The share of each outcome by step, as a run has measured it."""
    records = merge_steps(read_metrics(folder / "rl" / "metrics.jsonl"))
    return {
        label: {
            int(record["step"]): record[f"eval/part/env/{part}"]
            for record in records
            if f"eval/part/env/{part}" in record
        }
        for label, part in outcomes.items()
    }


def draw(axis: Axes, runs: Sequence[Mapping[str, Mapping[int, float]]], *, title: str) -> None:
    """The seeds of one game and their mean."""
    for number, label in enumerate(runs[0]):
        colour = f"C{number}"
        for run in runs:
            axis.plot(list(run[label]), list(run[label].values()), colour, lw=0.8, alpha=0.5)
        steps = sorted(set.intersection(*(set(run[label]) for run in runs)))
        means = [statistics.fmean(run[label][step] for run in runs) for step in steps]
        axis.plot(steps, means, colour, lw=2.2, label=label)
    axis.set(title=title, xlabel="step of RL", ylim=(-0.02, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(loc="center right")


if __name__ == "__main__":
    main()
