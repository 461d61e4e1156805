"""One recipe, several seeds: what came out of each, the mean, the spread, and their curves.

    python benchmarks/seeds.py recipes/demo.toml --seeds 0 1 2 3 4 --out seeds.png
    python benchmarks/seeds.py runs/seed0 runs/seed1 runs/seed2        # runs that are there already

The spread is the sample deviation over seeds. All seeds have the same problems: a task that makes
its own has a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PANELS = {
    "eval/accuracy": "Held-out accuracy",
    "reward/mean": "Training reward, mean of 5 steps",
    "objective/entropy": "Entropy (nats per token), mean of 5 steps",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("given", nargs="+", type=Path, help="a recipe, or run folders")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, help="picture of the curves")
    arguments, overrides = parser.parse_known_args()
    folders = arguments.given
    if folders[0].suffix == ".toml":
        folders = [arguments.folder / str(seed) for seed in arguments.seeds]
        for seed, folder in zip(arguments.seeds, folders, strict=True):
            run_once(arguments.given[0], [*overrides, "--run.seed", str(seed)], folder=folder)
    print(table([json.loads((folder / "summary.json").read_text()) for folder in folders]))
    if arguments.out is not None:
        draw([records(folder) for folder in folders], arguments.out)


def run_once(recipe: Path, overrides: list[str], *, folder: Path) -> None:
    """Run the recipe unless that folder holds its finished run."""
    command = [sys.executable, "-m", "posttrain.cli", "run", str(recipe), *overrides]
    subprocess.run([*command, "--run.folder", str(folder)], check=True, stdout=subprocess.DEVNULL)


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the RL stage, one a step."""
    lines = (folder / "rl" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def table(summaries: list[dict[str, Any]]) -> str:
    """Rows of Markdown: each estimate before and after, as mean ± spread and of every seed."""
    rows = ["| | before | after | of each seed |", "|---|---|---|---|"]
    for name in summaries[0]["after"]:
        before, after = (
            [100 * summary[when][name]["value"] for summary in summaries if when in summary]
            for when in ("before", "after")
        )
        each = ", ".join(f"{value:.1f}" for value in after)
        rows.append(f"| {name} | {spread(before)} | {spread(after)} | {each} |")
    return "\n".join(rows)


def spread(values: list[float]) -> str:
    """Mean and sample deviation in per cent.

    >>> spread([80.0, 90.0, 100.0])
    '90.0 ± 10.0 %'
    """
    if len(values) < 2:
        return f"{values[0]:.1f} %" if values else "–"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %"


def counted(values: list[float]) -> range:
    return range(1, len(values) + 1)


def draw(runs: list[list[dict[str, Any]]], path: Path) -> None:
    """One line a seed, in one panel for each metric."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.4), layout="constrained")
    for axis, (metric, title) in zip(axes, PANELS.items(), strict=True):
        for seed, run in enumerate(runs):
            known = [record for record in run if record.get(metric) is not None]
            values = [record[metric] for record in known]
            if metric != "eval/accuracy":
                values = [
                    statistics.fmean(values[max(0, n - 4) : n + 1]) for n in range(len(known))
                ]
            steps = [record["step"] for record in known]
            axis.plot(steps, values, label=f"seed {seed}", linewidth=1.3)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("step")
        axis.grid(axis="y", color="#dddddd")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_ylim(0, 1)
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
