"""Seconds of a learning step, its share of the device's peak (MFU), and where a GPU's time goes.

    python benchmarks/learning.py --device cuda --json learning.json
    python benchmarks/learning.py --device cuda --ways compiled --micro-batches 4096 16384

A step is forward, loss, backward and optimiser of LocalLearner on 64 prompts × 8 completions × 256
tokens (a CPU: 16 × 8 × 32), once for every way to run it: eager, layers compiled, passes captured
(CUDA graphs), both. The first two steps, which compile and record, are not counted. The work is
counted by :func:`operations`: only what any learner must compute, so no prompt twice, and no
recomputation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_models import build_model
from gpu_time import kernels_of, tell
from grpo_steps import peak
from rich.console import Console
from rich.table import Table
from roofline import Peak, Shape, find_peak, measured_peak, operations_of
from samplers import free, set_threads, timed

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import token_mean
from posttrain.fast.compiled import compile_layers
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

WAYS = {  # compiled, captured
    "eager": (False, False),
    "compiled": (True, False),
    "captured": (False, True),
    "compiled, captured": (True, True),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is learned from: ``group`` completions of ``length`` tokens for each prompt."""

    prompts: int
    group: int
    asked: int
    length: int

    @property
    def tokens(self) -> int:
        """Learned from in a step."""
        return self.prompts * self.group * self.length


def operations(shape: Shape, work: Work) -> dict[str, float]:
    """Operations of a step on completions of one length."""
    return operations_of(shape, [(work.asked, [work.length] * work.group)] * work.prompts)


def make_batch(work: Work, *, vocabulary: int) -> Batch:
    """Random tokens, rewards and advantages."""
    torch.manual_seed(0)
    rows = work.prompts * work.group
    asked = torch.randint(3, vocabulary, (work.prompts, work.asked))
    answered = torch.randint(3, vocabulary, (rows, work.length))
    tokens = torch.cat([asked.repeat_interleave(work.group, 0), answered], 1)
    mask = (torch.arange(tokens.shape[1]) >= work.asked).expand(tokens.shape).clone()
    batch = Batch(
        tokens=tokens,
        mask=mask,
        attention=torch.ones_like(mask),
        groups=torch.arange(work.prompts).repeat_interleave(work.group),
        advantages=torch.randn(rows, 1).expand(tokens.shape) * mask,
        sampler_logprobs=torch.zeros(tokens.shape),
    )
    return token_mean(batch)


@Objective
def objective(outputs: Outputs, batch: Batch) -> Terms:
    """The clipped loss of PPO and GRPO."""
    return clipped(outputs.need("logprobs"), batch)


class Bench:
    """A model, run in one way."""

    def __init__(self, model: Any, way: str, *, device: str) -> None:
        compiled, self._captured = WAYS[way]
        self._device = device
        self._cuda = device == "cuda"
        self._model = model.to(device)
        self.shape = Shape.of(self._model)
        if compiled:
            compile_layers(self._model)

    def measure(self, batch: Batch, tokens: int, *, steps: int) -> dict[str, Any]:
        """Median seconds and memory of steps in micro-batches of ``tokens``, and the kernels."""
        learner = LocalLearner(
            self._model,
            adamw(self._model, learning_rate=1e-6),
            save=lambda folder: None,
            micro_batch_tokens=tokens or "auto",
            compute=torch.bfloat16 if self._cuda else torch.float32,
            captured=self._captured,
        )
        taken = []
        for number in range(2 + steps):
            if number == 2 and self._cuda:
                torch.cuda.reset_peak_memory_stats()
            with timed(self._device) as seconds:
                result = learner.step(batch, objective)
            taken.append(seconds[0])
        found = {
            "micro_batch_tokens": learner.micro_batch_tokens,
            "seconds": statistics.median(taken[2:]),
            "all_seconds": taken,
            "gradient_norm": result.gradient_norm,
        }
        if self._cuda:
            found |= peak(self._device) | kernels_of(partial(learner.step, batch, objective))
        del learner
        free(self._device)
        return found


def show(rows: list[dict[str, Any]], *, work: Work, count: dict[str, float], most: Peak) -> None:
    titles = ("way", "micro-batch", "s", "tokens/s", "of peak", "GPU busy", "peak GiB")
    table = Table(*titles, title="A step of learning (medians)")
    total = sum(count.values())
    for row in rows:
        busy = sum(row.get("kernel_ms", {}).values()) / 1e3 / row["seconds"]
        table.add_row(
            row["way"],
            f"{row['micro_batch_tokens']:,}",
            f"{row['seconds']:.3f}",
            f"{work.tokens / row['seconds']:,.0f}",
            f"{total / row['seconds'] / most.flops_per_second:.1%}",
            f"{busy:.0%}" if busy else "–",
            f"{row['peak'] / 2**30:.2f}" if "peak" in row else "–",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    terms = " + ".join(f"{name} {number:.3g}" for name, number in count.items())
    best = min(rows, key=lambda row: row["seconds"])
    print(f"{work}: operations {terms} = {total:.3g}.")
    print(
        f"Fastest: {total:.3g} / {best['seconds']:.3f} s = {total / best['seconds']:.3g} a second"
    )
    print(f"Peak: {most.flops_per_second:.3g} operations/s ({most.source}).")
    if "kernel_ms" in best:
        print(tell(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a shape of bench_models.py")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="how to run it")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[0], help="tokens; 0: auto")
    parser.add_argument("--steps", type=int, default=5, help="that are counted")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    set_threads(given.device)
    given.model = given.model or ("smollm2-135m" if cuda else "tiny")
    sizes = {"prompts": 64, "group": 8, "asked": 48, "length": 256}
    work = Work(**sizes if cuda else {**sizes, "prompts": 16, "length": 32})
    compute = torch.bfloat16 if cuda else torch.float32
    most = find_peak(given.device, compute)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"work": vars(work), "peak": vars(most), "rows": rows}
    for way in given.ways or (list(WAYS) if cuda else ["eager"]):
        bench = Bench(build_model(given.model)[0], way, device=given.device)
        report["operations"] = count = operations(bench.shape, work)
        batch = make_batch(work, vocabulary=100)
        for tokens in given.micro_batches:
            rows.append({"way": way, **bench.measure(batch, tokens, steps=given.steps)})
            print(f"{way}, {tokens}: {rows[-1]['seconds']:.3f} s", flush=True)
            if given.json:  # after every row: a run that is cut short leaves what it has
                given.json.write_text(json.dumps(report, indent=1))
        del bench
        free(given.device)
    show(rows, work=work, count=count, most=most)
    if cuda:
        own = measured_peak(given.device, compute)
        print(f"Beside it: {own.flops_per_second:.3g} operations/s ({own.source}).")


if __name__ == "__main__":
    main()
