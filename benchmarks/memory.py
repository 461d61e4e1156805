"""Peak memory of scoring tokens, forward and backward: in chunks, and with whole logits.

    python benchmarks/memory.py [--device cpu|cuda] [--lengths 512 2048] [--json FILE]

What is measured is the step from hidden states to log-probs and entropies and back: the trunk of a
model comes on top and is the same for both. On a GPU factors are bfloat16, as in training.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its start and its end otherwise

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from posttrain.fast.token_scores import chunk_elements_for, token_scores

MEGABYTE = 2**20


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated at once, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return most


def naive(states: Tensor, tokens: Tensor, *, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as written down: all logits at once, and autograd."""
    every = nn.functional.linear(states, weight.to(states.dtype)).float().log_softmax(-1)
    chosen = every.gather(-1, tokens[:, None])[:, 0]
    return chosen, -(every.exp() * every).sum(-1)


def measure(length: int, vocabulary: int, *, width: int, device: torch.device) -> dict[str, int]:
    """Peak bytes of both ways for one number of tokens and one vocabulary."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    states = torch.randn(length, width, device=device, dtype=kind, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (length,), device=device)

    def ask(score: Callable[..., tuple[Tensor, Tensor]], **options: object) -> None:
        states.grad = weight.grad = None
        logprobs, entropies = score(states, tokens, weight=weight, **options)
        (logprobs + 0.1 * entropies).sum().backward()
        states.grad = weight.grad = None

    found = {"tokens": length, "vocabulary": vocabulary}
    ways = {
        "chunked": lambda: ask(token_scores, entropy="gradient"),
        "naive": lambda: ask(naive),
    }
    for name, work in ways.items():
        try:
            if device.type == "cuda":
                work()  # kernels are compiled, and libraries take their workspace, once
            found[name] = peak_bytes(work, device)
        except torch.cuda.OutOfMemoryError:
            found[name] = -1
            torch.cuda.empty_cache()
    return found


def show(rows: list[dict[str, int]], *, device: torch.device, width: int) -> None:
    chunk = chunk_elements_for(device) * 4 / MEGABYTE
    title = f"peak MB of scoring on {device.type}, states of {width}; one chunk is {chunk:,.0f} MB"
    table = Table(title=title, box=SIMPLE_HEAD)
    for name in ("tokens", "vocabulary", "head gradient", "chunked", "naive", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        chunked, whole = row["chunked"] / MEGABYTE, row["naive"] / MEGABYTE
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['vocabulary']:,}",
            f"{row['vocabulary'] * width * 4 / MEGABYTE:,.0f}",
            f"{chunked:,.0f}",
            "out of memory" if whole < 0 else f"{whole:,.0f}",
            "" if whole < 0 else f"{whole / chunked:.1f}",
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[105, 49_152, 151_936])
    parser.add_argument("--width", type=int, help="size of a hidden state")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    given = parser.parse_args()
    device = torch.device(given.device)
    lengths = given.lengths or ([512, 2048] if given.device == "cpu" else [4096, 16_384, 65_536])
    width = given.width or (64 if given.device == "cpu" else 1024)
    rows = [
        measure(length, vocabulary, width=width, device=device)
        for vocabulary in given.vocabularies
        for length in lengths
    ]
    show(rows, device=device, width=width)
    if given.json is not None:
        report = {"device": device.type, "width": width, "rows": rows}
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
