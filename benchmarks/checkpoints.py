"""What a checkpoint costs: seconds to write it, bytes on the disk, seconds to check it.

    python benchmarks/checkpoints.py [--shapes tiny smollm2-135m] [--repeats 3] [--folder DIR]

A policy of a real shape with random weights, and AdamW's two moments: what `[sft]` and `[rl]` save
without a critic. Writing is all that a stage waits for: the model folder, the moments, their
SHA-256, and bringing every file to the disk. By time, the next checkpoint comes no sooner than a
hundred times that later, so the last column is how often there can be one. Medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_models import SHAPES, write_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.learn.checkpoint import save_learner
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.runs import StageFolder
from posttrain.runs.checkpoints import newest, write_checkpoint
from posttrain.runs.keeper import SHARE


def make_learner(shape: str, folder: Path) -> LocalLearner:
    """A learner that has taken a step: without one there are no moments."""
    write_model(folder / "model", shape=shape)
    policy = load_policy(str(folder / "model"))
    optimizer = adamw(policy.model, learning_rate=1e-6)
    for weight in policy.model.parameters():
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return LocalLearner(policy.model, optimizer, save=functools.partial(save_policy, policy))


def measure(shape: str, *, repeats: int, folder: Path) -> dict[str, float]:
    """Write checkpoints one after the other, and look for the newest whole one."""
    learner = make_learner(shape, folder)
    stage = StageFolder(folder / "stage")
    written, working, checked = [], [], []
    for step in range(1, repeats + 1):
        started, worked = time.perf_counter(), time.process_time()
        path = write_checkpoint(
            stage, step, fill=lambda place: {"learner": save_learner(learner, place)}
        )
        written.append(time.perf_counter() - started)
        working.append(time.process_time() - worked)
        started = time.perf_counter()
        found, problems = newest(stage)
        assert found is not None, problems
        checked.append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    weights = sum(weight.numel() for weight in learner.model.parameters())
    seconds = statistics.median(written)
    return {
        "weights": weights,
        "bytes": size,
        "written": seconds,
        "working": statistics.median(working),
        "checked": statistics.median(checked),
        "interval": seconds / SHARE,
    }


def report(rows: dict[str, dict[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="A checkpoint", title_justify="left")
    table.add_column("model")
    headings = ("weights", "MB", "to write, s", "of it CPU, s", "to check, s", "at most every, min")
    for heading in headings:
        table.add_column(heading, justify="right")
    for shape, row in rows.items():
        table.add_row(
            shape,
            f"{row['weights'] / 1e6:.1f} M",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['written']:.2f}",
            f"{row['working']:.2f}",
            f"{row['checked']:.2f}",
            f"{row['interval'] / 60:.2g}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny", "smollm2-135m"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            rows[shape] = measure(shape, repeats=options.repeats, folder=Path(scratch))
    Console(width=100).print(report(rows))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
