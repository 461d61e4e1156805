"""What posttrain plan predicts, beside what runs on this machine take.

    python benchmarks/plan.py [--quick] [--cluster] [--steps 10] [--rounds 2] [--json FILE]

First the real queues with work that only sleeps (plan_asleep.py), then real runs: the costs are
those of a trial, as posttrain plan takes it, with one torch thread; measured is time/step, the
median over all steps of all rounds, which take turns. In one process, max_lag = 1 shares the cores
and Python's lock: it lies between "nothing overlaps" (what plan says of 0 engines) and "all
overlaps". With --cluster, learners and engines are processes of a local Ray cluster; there must be
a core for each that works at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import plan_asleep
from overlap import CASES, RL, WARM_UP
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.build.setup import Supplied
from posttrain.config import recipe_from_dict, resolve
from posttrain.distributed.engine_pool import ROUNDS
from posttrain.distributed.plans.compared import CALL
from posttrain.distributed.plans.measured import weight_moves
from posttrain.distributed.plans.simulate import Costs, Layout, simulate
from posttrain.distributed.plans.trial_costs import from_trial
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.run import run

BANDWIDTH = 0.5e9  # bytes a second, from one process of this machine to another


class Setting(NamedTuple):
    """A way to run a case."""

    learners: int
    engines: int
    max_lag: int

    def __str__(self) -> str:
        where = f"{self.learners} + {self.engines}" if self.engines else "one process"
        return f"{where}, max_lag {self.max_lag}"


ALONE = (Setting(1, 0, 0), Setting(1, 0, 1))
CLUSTER = (Setting(1, 1, 0), Setting(1, 1, 1), Setting(1, 2, 0), Setting(2, 2, 0))


def given(case: str, setting: Setting, *, steps: int, folder: Path) -> dict[str, Any]:
    """The recipe of a case."""
    model, _, changes = CASES[case]
    recipe: dict[str, Any] = {
        "run": {"folder": str(folder), "threads": 1, "device": "cpu"},
        "model": {"name": "tiny", "options": {**model, "max_positions": 64}},
        "task": {"name": "arithmetic", "digits": 2, "num_train": 200, "num_test": 10},
        "rl": {**RL, **changes, "steps": steps + WARM_UP, "max_lag": setting.max_lag},
    }
    if setting.engines:
        recipe["cluster"] = {
            "address": "local",
            "learners": setting.learners,
            "engines": setting.engines,
            "cpus_per_learner": 0.1,  # what Ray counts, not what they get
            "cpus_per_engine": 0.1,
        }
    return recipe


def measure(case: str, setting: Setting, *, steps: int, folder: Path) -> list[float]:
    """Seconds of every step of a run, after the first."""
    supplied = Supplied(rewards=RewardScorer({CASES[case][1]: 1.0}))
    recipe = recipe_from_dict(given(case, setting, steps=steps, folder=folder))
    done = run(recipe, supplied, console=Console(quiet=True))
    return [record["time/step"] for record in done.folder.stage("rl").records()[WARM_UP:]]


def costs_of(case: str, folder: Path) -> Costs:
    """What a trial of the case says."""
    recipe = given(case, ALONE[0], steps=1, folder=folder)
    supplied = Supplied(rewards=RewardScorer({CASES[case][1]: 1.0}))
    return from_trial(lambda: recipe_from_dict(recipe), supplied=supplied).costs


def predictions(case: str, setting: Setting, *, costs: Costs) -> Iterator[tuple[str, float]]:
    """What the simulation says, by name where there is more than one answer."""
    rl = resolve(recipe_from_dict(given(case, setting, steps=1, folder=Path("run")))).rl
    layout = Layout(
        **setting._asdict(),
        prompts_per_step=rl.prompts_per_step,
        group_size=rl.group_size,
        bandwidth=BANDWIDTH,
        learner_bandwidth=BANDWIDTH,
        call=CALL,
        rounds=ROUNDS,
        moves=weight_moves(rl),
        minibatches=rl.minibatches,
    )
    if setting.engines or not setting.max_lag:
        yield "", simulate(costs, layout).step
        return
    yield "nothing overlaps", simulate(costs, layout).step
    beside = replace(layout, engines=1, rounds=1, call=0.0, bandwidth=float("inf"))
    yield "all overlaps", simulate(costs, beside).step


def report(rows: list[dict[str, Any]]) -> Table:
    """Predicted beside measured."""
    table = Table(box=SIMPLE_HEAD, title="Seconds per step", title_justify="left")
    for name in ("case", "learners + engines", "measured", "predicted", "predicted / measured"):
        table.add_column(
            name, justify="left" if name in ("case", "learners + engines") else "right"
        )
    for row in rows:
        for name, predicted in row["predicted"].items():
            table.add_row(
                row["case"],
                row["setting"] + (f" ({name})" if name else ""),
                f"{row['measured']:.3f}",
                f"{predicted:.3f}",
                f"{predicted / row['measured']:.2f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, few steps, one case")
    parser.add_argument("--cluster", action="store_true", help="on a local Ray cluster too")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps, rounds = (4, 1) if options.quick else (options.steps, options.rounds)
    cases = options.case or (["wide"] if options.quick else list(CASES))
    settings = (*ALONE, *(CLUSTER if options.cluster else ()))
    rows = plan_asleep.rows(steps=5 if options.quick else 30)
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            costs = costs_of(case, Path(scratch) / "trial")
            took: dict[Setting, list[float]] = {setting: [] for setting in settings}
            for number in range(rounds):
                for place, setting in enumerate(settings):
                    folder = Path(scratch) / f"{cases.index(case)}-{number}-{place}"
                    took[setting] += measure(case, setting, steps=steps, folder=folder)
                    print(
                        f"{case}, {setting}: {statistics.median(took[setting]):.3f} s", flush=True
                    )
            rows += [
                {
                    "case": case,
                    "setting": str(setting),
                    "measured": statistics.median(took[setting]),
                    "predicted": dict(predictions(case, setting, costs=costs)),
                    "costs": {k: v for k, v in asdict(costs).items() if k != "groups"},
                }
                for setting in settings
            ]
    Console(width=110).print(report(rows))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
