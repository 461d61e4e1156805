"""LoRA against full fine-tuning: SmolLM2-135M learns two-term sums, every rank at several rates.

    python benchmarks/lora_sums.py --model models/smollm2 --parallel 3 --folder runs/lora_sums
    python benchmarks/lora_rates.py runs/lora_sums/results.json --picture lora_smollm2.png

recipes/smollm2_arithmetic.toml by GRPO, with fewer samples and steps. All rates and seeds of a rank
are one run ([[sweep]]); full fine-tuning has a run for each. What is finished is not run again.
Further options are the recipe's, and every run's: --rl.steps 30.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.runs import RunFolder

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_arithmetic.toml"
CHANGES = [
    "--rl.algorithm",
    "grpo",
    "--rl.steps",
    "60",
    "--rl.group_size",
    "8",
    "--rl.evaluate_every",
    "20",
]
RATES = {"full": (2e-5, 1e-4), "adapter": (2e-4, 1e-3)}


def main() -> None:
    """Run what is not done, and gather what came of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 8, 64], help="0: full")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/lora_sums"))
    given, others = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for rank in sorted(given.ranks, reverse=True) for job in plan(rank, given=given)]
    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(lambda job: run(*job, given=given, others=others), jobs))
    found = [row for folder, *_ in jobs for row in rows(folder)]
    text = json.dumps({"seeds": found}, indent=1)
    (given.folder / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def plan(rank: int, *, given: argparse.Namespace) -> Iterator[tuple[Path, str, list[str]]]:
    """The runs of a rank: a folder, tables behind the recipe, and options."""
    if rank:
        tables = [f"[[sweep]]\nrl.learning_rate = {rate}\n" for rate in RATES["adapter"]]
        options = ["--adapter.rank", str(rank), "--rl.adapters", str(given.seeds)]
        yield given.folder / f"rank-{rank}", "".join(tables), options
        return
    for seed in range(given.seeds):
        for rate in RATES["full"]:
            options = ["--rl.learning_rate", str(rate), "--run.seed", str(seed)]
            yield given.folder / f"full-{rate}-{seed}", "", options


def run(
    folder: Path, tables: str, options: list[str], *, given: argparse.Namespace, others: list[str]
) -> None:
    """One run, resumed where it was cut short; nothing where it is finished."""
    if (folder / "run.json").exists() and RunFolder(folder).finished:
        return
    recipe = folder.with_suffix(".toml")
    text = RECIPE.read_text(encoding="utf-8")
    recipe.write_text(f"{text}\n{tables}", encoding="utf-8")
    command = [sys.executable, "-m", "posttrain", "run", str(recipe), "--resume", *CHANGES]
    command += ["--run.folder", str(folder), "--model.name", given.model]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run([*command, *options, *others], check=True, stdout=log, stderr=log)


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What each adapter of a run, or the run itself, has come to."""
    for part in sorted((folder / "adapters").glob("*")) or [folder]:
        run, summary = RunFolder(part), RunFolder(part).summary
        assert summary is not None, f"{part} is not finished"
        adapter, rate = run.config["adapter"]["rank"], run.config["rl"]["learning_rate"]
        yield {
            "seed": summary["seed"],
            "before": summary["accuracy_before"],
            "after": summary["accuracy_after"],
            "overrides": ["--adapter.rank", str(adapter), "--rl.learning_rate", str(rate)],
        }


if __name__ == "__main__":
    main()
