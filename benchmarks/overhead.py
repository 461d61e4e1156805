"""What recording costs: the store and the trackers as a share of a training step.

    python benchmarks/overhead.py [--quick] [--steps 40] [--json FILE]

The RL stage of recipes/demo.toml (the tiny model, 64 prompts × 8 completions) and a smaller one,
in which a step is short and recording weighs most. What is measured is everything that happens
between two steps: rollouts handed over, metrics.jsonl, the diagnosis, the console, and TensorBoard
where it is installed. "Beside" is what a thread needs to write the rollouts while the next step
runs. Medians over the steps; the first three are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from algorithms import TASKS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.config import recipe_from_dict
from posttrain.runs import rollouts
from posttrain.stages import rl_watch
from posttrain.stages.run import run

WARM_UP = 3
LIMIT = 0.03
TRACKERS = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
DEMO = {"prompts_per_step": 64, "group_size": 8, "minibatches": 4}
CASES: dict[str, dict[str, Any]] = {
    "demo, 64 × 8 rollouts": DEMO,
    "16 × 8 rollouts, minibatches 4": {**DEMO, "prompts_per_step": 16},
    "64 × 8 rollouts, 48 tokens": {**DEMO, "max_new_tokens": 48},
}
TASK = TASKS["arithmetic"]["task"]
RL = {"algorithm": "grpo", "learning_rate": 5e-4, "max_new_tokens": 6, "check": "off"}


class Stopwatch:
    """Puts a clock around functions of a module or a class, and takes it off again."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        taken = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*arguments, **options)
            finally:
                taken.append(time.perf_counter() - started)

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, plain))

    def stop(self) -> None:
        for undo in self._undo:
            undo()


def measure(changes: dict[str, Any], *, steps: int, folder: Path) -> dict[str, float]:
    """One run: medians of the step's own seconds, of all recording, and of the rollouts in it."""
    given = {
        "run": {"folder": str(folder), "threads": 1, "device": "cpu", "trackers": TRACKERS},
        "model": {
            "name": "tiny",
            "options": {"hidden_size": 64, "num_layers": 2, "max_positions": 64},
        },
        "task": TASK,
        "rl": {**RL, **changes, "steps": steps + WARM_UP},
    }
    clock = Stopwatch()
    clock.watch(rl_watch.Watch, "on_step")
    clock.watch(rollouts.RolloutWriter, "write")
    clock.watch(rollouts, "_write")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            done = run(recipe_from_dict(given), console=Console(width=120))
    finally:
        clock.stop()
    own = [record["time/step"] for record in done.folder.stage("rl").records()]
    found = {"step": own, "recording": clock.seconds["on_step"]}
    found |= {"rollouts": clock.seconds["write"], "beside": clock.seconds["_write"]}
    medians = {name: statistics.median(taken[WARM_UP:]) for name, taken in found.items()}
    return {**medians, "share": medians["recording"] / (medians["step"] + medians["recording"])}


def report(rows: dict[str, dict[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Recording, as a share of a step", title_justify="left")
    table.add_column("case")
    for heading in ("step, ms", "recording, ms", "rollouts in it, ms", "share", "beside, ms"):
        table.add_column(heading, justify="right")
    for case, row in rows.items():
        cells = (f"{1000 * row[name]:.1f}" for name in ("step", "recording", "rollouts"))
        table.add_row(case, *cells, f"{row['share']:.1%}", f"{1000 * row['beside']:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (case, changes) in enumerate(CASES.items()):
            folder = Path(scratch) / str(number)
            rows[case] = measure(
                changes, steps=5 if options.quick else options.steps, folder=folder
            )
    Console(width=100).print(report(rows))
    within = rows["demo, 64 × 8 rollouts"]["share"] < LIMIT
    print(
        f"the demo is {'below' if within else 'NOT below'} {LIMIT:.0%}; {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
