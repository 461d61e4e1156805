"""The whole experiment: train the grid, measure it, print it, and write its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor

from posttrain.track.safe_terminal import Terminal
from posttrain.walkthrough import plots, report
from posttrain.walkthrough.analysis import Row, make_row
from posttrain.walkthrough.published import SEED
from posttrain.walkthrough.record import write_log
from posttrain.walkthrough.settings import KL, LOSSES, Configuration, Schedule, grid
from posttrain.walkthrough.training import History, one_thread, train

NUM_SEEDS, NUM_SEEDS_QUICK = 20, 5
NUM_GRADIENTS, NUM_GRADIENTS_QUICK = 256, 64
TRAINING_SHARE = 0.75  # share of the time of a configuration; the rest measures gradients
LOGGED = Configuration(delta="centered")


@one_thread()
def run(*, out: Path, quick: bool = False, seeds: int | None = None) -> list[Row]:
    """Run the sorting experiment and write its results to the folder ``out``.

    ``results.json`` holds the rows that are returned, one for each configuration (keys:
    :func:`posttrain.walkthrough.analysis.make_row`); ``curves.png`` loss and mean reward over
    training; ``log.txt`` every step of one run. ``quick`` runs 15 of the 90 configurations.
    """
    num_seeds = (NUM_SEEDS_QUICK if quick else NUM_SEEDS) if seeds is None else seeds
    if num_seeds < 2:
        raise ValueError(f"seeds: a spread needs at least 2, got {num_seeds}; raise --seeds")
    out.mkdir(parents=True, exist_ok=True)
    console, schedule = Terminal(), Schedule()
    num_gradients = NUM_GRADIENTS_QUICK if quick else NUM_GRADIENTS
    configurations = grid(quick=quick)
    with _progress(console) as progress:
        task = progress.add_task("", total=len(configurations))
        rows: list[Row] = []
        curves: dict[Configuration, tuple[Tensor, Tensor]] = {}
        for together in batches(configurations):
            history = _train(
                together, num_seeds=num_seeds, schedule=schedule, progress=progress, task=task
            )
            for index, configuration in enumerate(together):
                rows.append(make_row(history, index, num_batches=num_gradients, schedule=schedule))
                curves[configuration] = _curves(history, index)
                progress.advance(task, 1 - TRAINING_SHARE)
        progress.update(task, description="writing curves.png and log.txt")
        plots.draw(curves, out / "curves.png")
        with (out / "log.txt").open("w", encoding="utf-8") as log:
            write_log(log, LOGGED, seed=SEED, schedule=schedule)
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    report.show(rows, console)
    files = ", ".join(("results.json", "curves.png", "log.txt"))
    console.print(f"Written to {out}: {files}", highlight=False, soft_wrap=True)
    return rows


def batches(configurations: Sequence[Configuration]) -> list[list[Configuration]]:
    """The configurations, those that share a loss and a KL setting together."""
    together = [
        [each for each in configurations if (each.loss, each.kl) == (loss, kl)]
        for loss in LOSSES
        for kl in KL
    ]
    return [each for each in together if each]


def _train(
    together: Sequence[Configuration],
    *,
    num_seeds: int,
    schedule: Schedule,
    progress: Progress,
    task: TaskID,
) -> History:
    """Train one batch of configurations, and move the bar a little with every epoch."""
    first, share = together[0], len(together) * TRAINING_SHARE / schedule.num_epochs
    progress.update(task, description=f"{first.loss}, KL {first.kl}, {num_seeds} seeds")
    return train(
        together,
        seeds=range(num_seeds),
        schedule=schedule,
        after_epoch=lambda: progress.advance(task, share),
    )


def _curves(history: History, index: int) -> tuple[Tensor, Tensor]:
    lanes = history.lanes(index)
    return history.rewards[lanes].mean((2, 3)), history.losses[lanes]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("configurations"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
