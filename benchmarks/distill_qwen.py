"""A larger model teaches a smaller one on GSM8K's prompts, beside GRPO in the same time.

    python benchmarks/distill_qwen.py --student models/qwen05 --teacher models/qwen15 \
        --gsm8k data/gsm8k --seeds 0 1 2

Both are Hugging Face folders or GGUF files of one family. Each job is a run of recipes/gsm8k.toml
in a process of its own, into a folder of --folder; one that is finished is not run again. GRPO
takes --grpo times the steps of distillation, and is read where it has learned as long as the
distillation before it. Further options are the recipe's, and every run's: --task.num_test 4.
The last lines, and results.json in the folder: accuracy on held-out problems before and after,
seconds of sampling and learning without evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from posttrain.runs import RunFolder

RECIPE = Path(__file__).parents[1] / "recipes" / "gsm8k.toml"
JOBS: dict[str, tuple[str, ...]] = {
    # One completion of eight times as many prompts: as many rollouts a step as GRPO has.
    "gkd": ("--rl.algorithm", "gkd", "--rl.learning_rate", "1e-5"),
    "distill": ("--rl.algorithm", "distill", "--rl.learning_rate", "3e-6"),
    "grpo": (),
}


class Point(NamedTuple):
    """An evaluation during a run: after so many steps and seconds of sampling and learning."""

    step: int
    seconds: float
    accuracy: float


def main() -> None:
    """Run the jobs that are not done, and print what came of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--gsm8k", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--grpo", type=int, default=2, help="times the steps of distillation")
    parser.add_argument("--folder", type=Path, default=Path("runs/distill_qwen"))
    given, others = parser.parse_known_args()
    rows = []
    for seed in given.seeds:
        longest = 0.0
        for job in [name for name in JOBS if name in given.jobs]:
            folder = given.folder / f"{job}-{seed}"
            run(job, seed, folder=folder, given=given, others=others)
            curve = points(folder)
            if job == "grpo" and longest:
                curve = [point for point in curve if point.seconds <= longest]
            else:
                longest = max(longest, curve[-1].seconds)
            rows.append({"job": job, "seed": seed, "before": curve[0], "after": curve[-1]})
    for row in rows:
        before, after = row["before"], row["after"]
        print(
            f"{row['job']:8} seed {row['seed']}: {before.accuracy:.1%} before, "
            f"{after.accuracy:.1%} after {after.step} steps, {after.seconds:.0f} s"
        )
    (given.folder / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def run(
    job: str, seed: int, *, folder: Path, given: argparse.Namespace, others: Sequence[str]
) -> None:
    """One run of the recipe, resumed where it was cut short; nothing where it is finished."""
    if (folder / "run.json").exists() and RunFolder(folder).finished:
        return
    taught = job != "grpo"
    steps = given.steps if taught else given.steps * given.grpo
    prompts = ["--teacher.model", given.teacher, "--teacher.dtype", "bfloat16"] if taught else []
    if taught:
        prompts += ["--rl.prompts_per_step", "512", "--rl.group_size", "1"]
    settings = {
        "--run.folder": folder,
        "--run.seed": seed,
        "--model.name": given.student,
        "--task.path": given.gsm8k,
        "--rl.steps": steps,
    }
    command = [sys.executable, "-m", "posttrain", "run", str(RECIPE), "--resume"]
    command += [str(word) for pair in settings.items() for word in pair]
    subprocess.run([*command, *JOBS[job], *prompts, *others], check=True)


def points(folder: Path) -> list[Point]:
    """The evaluations of a run, in order."""
    found, seconds = [], 0.0
    for record in RunFolder(folder).stage("rl").records():
        seconds += record.get("time/step", 0.0)
        if "eval/accuracy" in record:
            found.append(Point(int(record["step"]), seconds, record["eval/accuracy"]))
    return found


if __name__ == "__main__":
    main()
