"""Every critic-free algorithm under the same budget: same warm-up, rollouts and optimiser steps.

    python benchmarks/algorithms.py [--quick] [--seeds 3] [--json FILE]

For each task and seed one tiny model is warmed up on demonstrations of which a part is wrong; each
algorithm then starts from that model. Held-out accuracy is greedy. All run without a KL penalty, so
that what differs is the advantage, the loss and the averaging. Two optimiser steps a batch: with
one the ratio is 1 and GRPO, GSPO and SAPO would be the same algorithm. DAPO throws groups back and
so samples more than the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from posttrain.algorithms.table import ALGORITHMS
from posttrain.config import recipe_from_dict
from posttrain.stages.run import run

TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {
        "task": {
            "name": "arithmetic",
            "operators": "+",
            "digits": 1,
            "num_operands": 3,
            "num_train": 800,
            "num_test": 150,
        },
        "sft": {"wrong_share": 0.4, "epochs": 25},
    },
    "sort": {
        "task": {"name": "sort", "length": 3, "maximum": 9, "num_train": 600, "num_test": 100},
        "sft": {"wrong_share": 0.4, "epochs": 12},
    },
}
MODEL = {"hidden_size": 64, "num_layers": 2, "max_positions": 64}
SFT = {"batch_size": 64, "learning_rate": 2e-3, "warmup_steps": 20}
RL = {
    "prompts_per_step": 32,
    "group_size": 8,
    "epochs": 1,
    "minibatches": 2,
    "learning_rate": 5e-4,
    "warmup_steps": 5,
    "schedule": "linear",
    "max_new_tokens": 8,
    "kl": {"placement": "none"},
    "overlong_buffer": 0,
}


def warm_up(task: str, seed: int, *, folder: Path) -> Path:
    """The SFT model that every algorithm of this task and seed starts from."""
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": ["sft"]},
        "model": {"name": "tiny", "options": MODEL},
        "task": TASKS[task]["task"],
        "sft": {**SFT, **TASKS[task]["sft"]},
    }
    return run(recipe_from_dict(given), console=Console(quiet=True)).model


def measure(
    algorithm: str, task: str, *, seed: int, model: Path, steps: int, folder: Path
) -> dict[str, Any]:
    """One algorithm from the warmed-up model: accuracy before and after, and the seconds."""
    started = time.perf_counter()
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": ["rl", "eval"]},
        "model": {"name": str(model)},
        "task": TASKS[task]["task"],
        "rl": {**RL, "algorithm": algorithm, "steps": steps},
        "eval": {"problems": 150},
    }
    summary = run(recipe_from_dict(given), console=Console(quiet=True)).summary
    return {
        "algorithm": algorithm,
        "task": task,
        "seed": seed,
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "reward_last": summary["reward_last"],
        "seconds": time.perf_counter() - started,
    }


def spread(values: list[float]) -> str:
    """Mean ± sample deviation, in per cent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * deviation:.1f}"


def report(rows: list[dict[str, Any]], steps: int) -> Table:
    """One line for each algorithm, one column for each task; best first by the mean of tasks."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    rollouts = RL["prompts_per_step"] * RL["group_size"]
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Held-out accuracy (%) after {steps} steps of {rollouts} rollouts",
        title_justify="left",
    )
    table.add_column("algorithm")
    for task in tasks:
        table.add_column(task, justify="right")

    def after(algorithm: str, task: str) -> list[float]:
        chosen = [r for r in rows if r["algorithm"] == algorithm and r["task"] == task]
        return [row["accuracy_after"] for row in chosen]

    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    names.sort(key=lambda name: -sum(statistics.mean(after(name, task)) for task in tasks))
    starts = {(r["task"], r["seed"]): r["accuracy_before"] for r in rows}
    before = [[v for (name, _), v in starts.items() if name == task] for task in tasks]
    table.add_row("[dim]before (SFT)[/dim]", *[f"[dim]{spread(values)}[/dim]" for values in before])
    for name in names:
        table.add_row(name, *[spread(after(name, task)) for task in tasks])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    steps = 5 if options.quick else options.steps
    names = [name for name, row in ALGORITHMS.items() if not row.critic]
    rows = []
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        bar = progress.add_task("runs", total=len(TASKS) * len(seeds) * len(names))
        for task in TASKS:
            for seed in seeds:
                base = Path(scratch) / f"{task}-{seed}"
                model = warm_up(task, seed, folder=base / "sft")
                for name in names:
                    progress.update(bar, description=f"{task} {seed} {name}")
                    rows.append(
                        measure(name, task, seed=seed, model=model, steps=steps, folder=base / name)
                    )
                    progress.advance(bar)
    Console().print(report(rows, steps))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
