"""Held-out accuracy over learning rate, a line for each rank and one for full fine-tuning.

    python benchmarks/sweep.py benchmarks/sweeps/lora_tiny.toml --out runs/lora_tiny
    python benchmarks/lora_rates.py runs/lora_tiny.json --picture docs/images/lora_tiny.png

reads what sweep.py wrote, prints the table of docs/adapters.md and draws it: means over seeds, with
the lowest and the highest seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

Rates = dict[float, list[float]]  # the accuracies of all seeds, by the learning rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="the JSON of sweep.py")
    parser.add_argument("--picture", type=Path, help="the PNG to draw")
    given = parser.parse_args()
    runs = json.loads(given.sweep.read_text(encoding="utf-8"))["seeds"]
    found = by_rank(runs)
    before = statistics.fmean(run["before"] for run in runs if run["before"] is not None)
    print(table(found, before=before))
    if given.picture:
        draw(found, given.picture, before=before)


def by_rank(runs: Sequence[Mapping[str, Any]]) -> dict[int, Rates]:
    """The finished runs by the rank of their adapters (0: all weights learn) and their rate.

    >>> option = ["--adapter.rank", "8", "--rl.learning_rate", "0.01"]
    >>> by_rank([{"after": 0.5, "overrides": option}, {"after": None, "overrides": option}])
    {8: {0.01: [0.5]}}
    """
    found: dict[int, Rates] = {}
    for run in runs:
        if run["after"] is not None:
            given = dict(zip(run["overrides"][::2], run["overrides"][1::2], strict=True))
            rates = found.setdefault(int(given.get("--adapter.rank", 0)), {})
            rate = float(given["--rl.learning_rate"])
            rates.setdefault(rate, []).append(run["after"])
    return {rank: dict(sorted(found[rank].items())) for rank in sorted(found)}


def table(found: Mapping[int, Rates], *, before: float) -> str:
    """In Markdown: a row for each rank, its accuracies from the lowest rate to the highest."""
    lines = [f"Before: {before:.1%}.", "", "| | accuracy by learning rate: mean (seeds) | best |"]
    lines.append("|---|---|---|")
    for rank, rates in found.items():
        cells = [
            f"{rate:g}: {statistics.fmean(values):.0%} "
            f"({', '.join(f'{value:.0%}' for value in values)})"
            for rate, values in rates.items()
        ]
        best = max(rates, key=lambda rate: statistics.fmean(rates[rate]))
        name = f"rank {rank}" if rank else "all weights"
        mean = statistics.fmean(rates[best])
        lines.append(f"| {name} | {'; '.join(cells)} | {mean:.0%} at {best:g} |")
    return "\n".join(lines)


def draw(found: Mapping[int, Rates], path: Path, *, before: float) -> None:
    """One line a rank; the bars reach from the lowest seed to the highest."""
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for number, (rank, rates) in enumerate(found.items()):
        means = [statistics.fmean(values) for values in rates.values()]
        low = [mean - min(values) for mean, values in zip(means, rates.values(), strict=True)]
        high = [max(values) - mean for mean, values in zip(means, rates.values(), strict=True)]
        axis.errorbar(
            [rate * 1.03**number for rate in rates],  # beside each other
            means,
            yerr=[low, high],
            marker="o",
            capsize=3,
            color="black" if not rank else f"C{number}",
            label=f"LoRA, rank {rank}" if rank else "all weights",
        )
    axis.axhline(before, color="#999999", linewidth=1, linestyle="--", label="before")
    axis.set_xscale("log")
    known = sorted({rate for rates in found.values() for rate in rates})
    axis.set_xticks(known, [f"{rate:g}" for rate in known])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("learning rate")
    axis.set_ylabel("held-out accuracy")
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(axis="y", color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
