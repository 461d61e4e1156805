"""Sampling beside learning: seconds per step with max_lag 0 and 1, side by side in one run.

    python benchmarks/overlap.py [--quick] [--steps 12] [--rounds 3] [--threads 1] [--json FILE]
    python benchmarks/overlap.py --cluster --only wide

The second has a learner and an engine in processes of their own, on a local Ray cluster. Each case
runs GRPO from random weights, so every completion is as long as it may be. The settings take turns,
and the median over all steps of all rounds is shown: other work on the machine meets all of them
alike. Samples/s are those of the best round, the one that other work has held up least. A step is
the time between two steps' rollout files: everything is in it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.build.setup import Supplied
from posttrain.config import recipe_from_dict
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.run import run

WARM_UP = 3  # steps that are not measured: the first batches of a run ahead have no lag yet


def letters(completion: str) -> float:
    """At once; the completions of a prompt never agree."""
    return sum(map(ord, completion)) % 11 / 11


def judged(completion: str) -> float:
    """As a judge behind a network: 20 ms in which this machine has nothing to do."""
    time.sleep(0.02)
    return letters(completion)


# What is sampled and learned, the reward, and changes to [rl].
CASES: dict[str, tuple[dict[str, int], Callable[[str], float], dict[str, Any]]] = {
    "tiny": ({"hidden_size": 64, "num_layers": 2}, letters, {}),
    "wide": ({"hidden_size": 192, "num_layers": 4}, letters, {}),
    "tiny, slow reward": ({"hidden_size": 64, "num_layers": 2}, judged, {"epochs": 4}),
}
LAGS = (0, 1)
CLUSTER = {"engines": 1, "cpus_per_learner": 0.5, "cpus_per_engine": 0.5}
RL = {
    "algorithm": "grpo",
    "prompts_per_step": 4,
    "group_size": 8,
    "max_new_tokens": 24,
    "learning_rate": 1e-4,
    "check": "off",
}


def measure(
    case: str, max_lag: int, *, threads: int, steps: int, folder: Path, address: str | None
) -> dict[str, Any]:
    """One run: the seconds of every step, what was waited, and how old the rollouts were.

    With the ``address`` of a Ray cluster, the learner and an engine are processes of their own.
    """
    model, reward, changes = CASES[case]
    given: dict[str, Any] = {
        "run": {"folder": str(folder), "threads": threads, "device": "cpu"},
        "model": {"name": "tiny", "options": {**model, "max_positions": 64}},
        "task": {"name": "arithmetic", "digits": 2, "num_train": 200, "num_test": 10},
        "rl": {**RL, **changes, "steps": steps + WARM_UP, "max_lag": max_lag},
    }
    if address is not None:
        given["cluster"] = {**CLUSTER, "address": address}
    done = run(
        recipe_from_dict(given),
        Supplied(rewards=RewardScorer({reward: 1.0})),
        console=Console(quiet=True),
    )
    stage = done.folder.stage("rl")
    written = sorted(path.stat().st_mtime for path in stage.rollouts.glob("step-*"))
    records = stage.records()[WARM_UP:]
    return {
        "case": case,
        "max_lag": max_lag,
        "samples": given["rl"]["prompts_per_step"] * given["rl"]["group_size"],
        "seconds": [b - a for a, b in zip(written[WARM_UP - 1 :], written[WARM_UP:], strict=False)],
        "wait": [record["time/wait"] for record in records],
        "rollout": [record["time/rollout"] + record["time/reward"] for record in records],
        "train": [record["time/train"] for record in records],
        "staleness": [record["staleness/mean"] for record in records],
    }


@contextlib.contextmanager
def ray_cluster(wanted: bool) -> Iterator[str | None]:
    """The address of a Ray cluster on this machine, for all runs."""
    if not wanted:
        yield None
        return
    from posttrain.distributed.local_cluster import LocalCluster

    with contextlib.closing(LocalCluster(nodes=1, cpus=2)) as cluster:
        yield cluster.address


def report(rows: list[dict[str, Any]]) -> Table:
    """Medians by case and lag; the ratio is to the same case without a lag."""
    table = Table(box=SIMPLE_HEAD, title="Seconds per step (medians)", title_justify="left")
    table.add_column("case")
    names = ("max_lag", "step", "ratio", "waited", "rollout + reward", "train", "staleness")
    for name in (*names, "samples/s"):
        table.add_column(name, justify="right")

    def median(case: str, max_lag: int, *, key: str) -> float:
        chosen = [r[key] for r in rows if (r["case"], r["max_lag"]) == (case, max_lag)]
        return statistics.median(value for values in chosen for value in values)

    def best(case: str, max_lag: int) -> float:
        chosen = [r for r in rows if (r["case"], r["max_lag"]) == (case, max_lag)]
        return max(r["samples"] / statistics.mean(r["seconds"]) for r in chosen)

    for case in dict.fromkeys(row["case"] for row in rows):
        for max_lag in LAGS:
            took = median(case, max_lag, key="seconds")
            table.add_row(
                case if max_lag == LAGS[0] else "",
                str(max_lag),
                f"{took:.3f}",
                f"{took / median(case, LAGS[0], key='seconds'):.2f}",
                *(f"{median(case, max_lag, key=key):.3f}" for key in ("wait", "rollout", "train")),
                f"{median(case, max_lag, key='staleness'):.0f}",
                f"{best(case, max_lag):.0f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, few steps")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each of the two")
    parser.add_argument("--cluster", action="store_true", help="1 learner + 1 engine, on Ray")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no round after these")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps, rounds = (3, 1) if options.quick else (options.steps, options.rounds)
    rows = []
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch, ray_cluster(options.cluster) as address:
        for number, case in itertools.product(range(rounds), options.only):
            if rows and time.monotonic() > until:
                print(f"left out for want of time: {case}, round {number}")
                continue
            for max_lag in LAGS:
                folder = Path(scratch) / f"{case}-{number}-{max_lag}".replace(" ", "_")
                row = measure(
                    case,
                    max_lag,
                    threads=options.threads,
                    steps=steps,
                    folder=folder,
                    address=address,
                )
                rows.append(row)
                took, mean = statistics.median(row["seconds"]), statistics.mean(row["seconds"])
                rate = f"{row['samples'] / mean:.1f} samples/s"
                print(
                    f"{case}, round {number}, max_lag {max_lag}: {took:.3f} s, {rate}", flush=True
                )
    Console(width=110).print(report(rows))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
