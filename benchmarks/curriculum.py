"""A curriculum against all prompts in turn, at the same number of rollouts: docs/data.md.

    python benchmarks/curriculum.py --seeds 0 1 2 --json curriculum.json

Each seed trains one tiny model on demonstrations of which nearly half are wrong, and then by GRPO
from there: once with every prompt in turn, and with ``[rl.curriculum]`` of several bands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from posttrain.config import read_recipe
from posttrain.stages.results import Run
from posttrain.stages.run import run
from posttrain.track.safe_terminal import Terminal

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
_BANDS = {
    "0.2 to 0.8": (0.2, 0.8, 0.1),
    "0.05 to 0.95": (0.05, 0.95, 0.2),
    "to 0.95": (0, 0.95, 0.2),
}
WAYS: dict[str, list[str]] = {
    "in turn": [],
    **{
        band: [
            *("--rl.curriculum.low", str(low)),
            *("--rl.curriculum.high", str(high)),
            *("--rl.curriculum.outside", str(outside)),
        ]
        for band, (low, high, outside) in _BANDS.items()
    },
}


def train(folder: Path, overrides: list[str], *, stages: str) -> Run:
    options = ["--run.folder", str(folder), "--run.stages", stages, "--run.save_minutes", "0"]
    recipe = read_recipe(RECIPE, [*options, *overrides])
    return run(recipe, console=Terminal(quiet=True))


def measured(made: Run) -> dict[str, Any]:
    records = made.folder.stage("rl").records()
    silent = [
        record["rollout/groups_without_signal"]
        for record in records
        if "rollout/groups_without_signal" in record
    ]
    return {
        "before": made.summary["accuracy_before"],
        "after": made.summary["accuracy_after"],
        "no signal": statistics.fmean(silent),
        "curve": {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[int, Any]] = {way: {} for way in WAYS}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as place:
            seeded = ["--run.seed", str(seed)]
            begun = train(Path(place) / "sft", seeded, stages="sft").model
            shared = [*seeded, "--model.name", str(begun), "--model.options", "{}"]
            shared += ["--rl.steps", str(given.steps), "--rl.prompts_per_step", str(given.prompts)]
            shared += ["--rl.evaluate_every", str(given.steps // 4), "--rl.check", "off"]
            for way, options in WAYS.items():
                made = train(Path(place) / way, [*shared, *options], stages="rl,eval")
                found[way][seed] = measured(made)
                print(way, seed, found[way][seed], flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print("| prompts | accuracy after SFT | after GRPO, by seed | mean | groups without signal |")
    print("|---|---|---|---|---|")
    for way, runs in found.items():
        columns = {key: [each[key] for each in runs.values()] for key in ("before", "after")}
        begun, ended = (", ".join(f"{v:.1%}" for v in columns[key]) for key in columns)
        silent = statistics.fmean(each["no signal"] for each in runs.values())
        mean = statistics.fmean(columns["after"])
        print(f"| {way} | {begun} | {ended} | {mean:.1%} | {silent:.0%} |")


if __name__ == "__main__":
    main()
