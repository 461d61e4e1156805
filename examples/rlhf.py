"""RLHF in full, and what goes wrong with too small a β: SFT, PPO and GRPO side by side on a CPU.

    python examples/rlhf.py [--folder runs/rlhf] [--seed 0] [--quick]

The stages of recipes/rlhf.toml up to the reward model are run once; then PPO and GRPO learn from
that reward model, each with a KL coefficient that is right and with one that is too small, two at
a time. Left behind are a table (summary.json) and a picture (goodhart.png) of the reward model's
score and the hidden true score against the divergence from the SFT model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import posttrain
from posttrain.data.collate import collate
from posttrain.fast.score import score_tokens
from posttrain.models.load import load_policy
from posttrain.pipelines.evaluate import Evaluation
from posttrain.runs import RunFolder

RECIPE = Path(__file__).parents[1] / "recipes" / "rlhf.toml"
RIGHT, SMALL = 0.1, 0.01
STEPS = {RIGHT: 100, SMALL: 50}
GRPO = ["--rl.algorithm", "grpo", "--rl.prompts_per_step", "32", "--rl.group_size", "8"]
RUNS = [(algorithm, beta) for algorithm in ("PPO", "GRPO") for beta in (SMALL, RIGHT)]
QUICK = ["--sft.num_demonstrations", "2000", "--sft.epochs", "1", "--prefer.repeats", "1"]
QUICK += ["--reward.epochs", "1"]
RM, TRUE = "reward/part/model", "reward/part/melody"
COLOURS = {RM: "#c2571a", TRUE: "#2563b0"}


def main() -> None:
    """Run everything, print the table, write the summary and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    started = time.monotonic()
    folder: Path = arguments.folder
    seed = ["--run.seed", str(arguments.seed)]
    stages = ["--run.stages", "sft,prefer,reward", *(QUICK if arguments.quick else [])]
    command(["run", str(RECIPE), "--run.folder", str(folder / "base"), *stages, *seed])
    learn(folder, steps=dict.fromkeys(STEPS, 3) if arguments.quick else STEPS, options=seed)
    rows = {"SFT": measure(folder / "base" / "sft" / "model", folder=folder)}
    for algorithm, beta in RUNS:
        model = run_folder(folder, algorithm, beta=beta) / "rl" / "model"
        rows[f"{algorithm}, β = {beta}"] = measure(model, folder=folder)
    verdict = (RunFolder(folder / "base").summary or {})["reward_model"]
    summary = {
        "seed": arguments.seed,
        "reward_model": verdict,
        "table": rows,
        "seconds": time.monotonic() - started,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    draw(folder)
    show(summary, folder=folder)


def command(arguments: list[str], *, log: Path | None = None) -> None:
    """Run ``posttrain``, its output to a file where one is given; stop where it fails."""
    words = [sys.executable, "-m", "posttrain.cli", *arguments]
    if log is None:
        if subprocess.run(words, check=False).returncode:
            raise SystemExit(f"posttrain {' '.join(arguments)} failed")
        return
    with log.open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"posttrain {' '.join(arguments)} failed:\n{log.read_text()[-2000:]}")


def run_folder(folder: Path, algorithm: str, *, beta: float) -> Path:
    """Where one of the RL runs is kept."""
    return folder / f"{algorithm.lower()}-{beta}"


def learn(folder: Path, *, steps: Mapping[float, int], options: list[str]) -> None:
    """The RL runs, two at a time, each from the same SFT model against the same reward model."""
    base = folder / "base"

    def one(algorithm: str, beta: float) -> None:
        target = run_folder(folder, algorithm, beta=beta)
        kl = f'{{ placement = "reward", coefficient = {beta} }}'
        start = ["--model.name", str(base / "sft" / "model"), "--model.options", "{}"]
        judge = ["--rewards.model", f'{{ weight = 1.0, path = "{base / "reward" / "model"}" }}']
        place = ["--run.folder", str(target), "--rl.kl", kl, "--rl.steps", str(steps[beta])]
        words = ["rl", str(RECIPE), *start, *judge, *place, *options]
        log = folder / f"{target.name}.log"
        command([*words, *(GRPO if algorithm == "GRPO" else [])], log=log)

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(2) as pool:
        bars = {
            key: progress.add_task(f"{key[0]}, β = {key[1]}", total=steps[key[1]]) for key in RUNS
        }
        jobs = [pool.submit(one, *key) for key in RUNS]
        while not all(job.done() for job in jobs):
            for (algorithm, beta), bar in bars.items():
                target = run_folder(folder, algorithm, beta=beta)
                progress.update(bar, completed=len(list(records(target))))
            time.sleep(0.5)
        for job, bar in zip(jobs, bars.values(), strict=True):
            job.result()
            progress.update(bar, completed=progress.tasks[bar].total)


def records(target: Path) -> Iterator[Mapping[str, Any]]:
    """What an RL run has logged so far."""
    file = target / "rl" / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        yield json.loads(line)


def measure(model: Path, *, folder: Path) -> dict[str, float]:
    """Scores and divergence on held-out prompts, from samples at temperature 1."""
    base = folder / "base"
    judge = {"weight": 1.0, "path": str(base / "reward" / "model")}
    found = posttrain.evaluate(
        model,
        task="melody",
        reward={"melody": 0.0, "model": judge},
        samples=4,
        max_new_tokens=24,
    )
    scores = [rollout.score.parts for rollout in found.sampled if rollout.score is not None]
    return {
        "rm_score": sum(parts["model"] for parts in scores) / len(scores),
        "true_score": sum(parts["melody"] for parts in scores) / len(scores),
        "kl": divergence(found, base / "sft" / "model"),
        "length": sum(len(r.text) for r in found.sampled) / len(found.sampled),
    }


@torch.no_grad()
def divergence(found: Evaluation, reference: Path) -> float:
    """Mean over sequences of Σ log π − log π_ref: what the sampler said, less the reference."""
    policy = load_policy(str(reference))
    batch = collate(found.sampled, pad_token=policy.pad_token)
    logprobs = score_tokens(policy.model, batch).need("logprobs")
    return float((batch.need("sampler_logprobs") - logprobs)[batch.mask].sum()) / len(found.sampled)


def draw(folder: Path) -> None:
    """The two scores against the divergence, one panel for each algorithm."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, algorithm in zip(axes, ("PPO", "GRPO"), strict=True):
        for beta, style in ((SMALL, "--"), (RIGHT, "-")):
            rows = list(records(run_folder(folder, algorithm, beta=beta)))
            kl = smooth([max(row["objective/kl"], 0.0) for row in rows])
            for metric, name in ((RM, "reward model"), (TRUE, "true score")):
                values = smooth([row[metric] for row in rows])
                label = f"{name}, β = {beta}"
                axis.plot(kl, values, style, color=COLOURS[metric], label=label, linewidth=1.8)
                axis.plot(kl[-1], values[-1], "o", color=COLOURS[metric], markersize=5)
        axis.set_xscale("function", functions=(lambda x: abs(x) ** 0.5, lambda x: x**2))
        axis.set_xticks([0, 1, 2, 5, 10, 20, 30, 40, 50, 60])
        axis.set_title(algorithm, loc="left", fontsize=11)
        axis.set_xlabel("KL to the SFT model (nats per melody, root scale)")
        axis.grid(color="#e6e6e6")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("score")
    axes[1].legend(frameon=False, fontsize=9)
    title = "Too small a β: the reward model is ever happier, the listener is not"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.savefig(folder / "goodhart.png", dpi=150)


def smooth(values: list[float], reach: int = 3) -> list[float]:
    """A running mean of seven steps."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def show(summary: Mapping[str, Any], *, folder: Path) -> None:
    """Print the table."""
    verdict = summary["reward_model"]
    table = Table(title=f"Held-out melodies, seed {summary['seed']}")
    for heading in ("", "RM score", "true score", "KL to SFT", "length"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in summary["table"].items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    console = Console()
    console.print(table)
    console.print(
        f"reward model: {verdict['accuracy']:.1%} of {verdict['num_pairs']:,} held-out pairs; "
        f"{summary['seconds']:.0f} s in all; {folder / 'goodhart.png'}, {folder / 'summary.json'}"
    )


if __name__ == "__main__":
    main()
