"""Partial rollouts: seconds of sampling between two updates, with completions in 1, 2 and 4 parts.

    python benchmarks/partial.py [--device cuda] [--json FILE]

Lengths as of a model that ends where it likes: every token is the last with probability 6 / limit
(bench_models.py), so that half of the completions are shorter than an eighth of the limit and some
reach it. In one part a batch takes as many steps as its longest completion has tokens, most of them
with few sequences left. In several, the longest go on beside the beginning of the next batches, and
all that they have is read again. The settings take turns; nothing is learned in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_models import build_model, prompts
from rich.console import Console
from rich.table import Table
from roofline import synchronize
from samplers import set_threads

from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.partial import PartialSource
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score

PARTS = (1, 2, 4)
SIZES = {"cpu": ("tiny", 8, 8, 128), "cuda": ("smollm2-135m", 32, 8, 512)}  # prompts, group, limit
WARM_UP = 5  # batches that are not counted: the first ones have no others under way


class Unjudged:
    """Rewards are not measured."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


def batches(device: str, partial: int) -> Iterator[Collected]:
    """Batches without end."""
    shape, count, group, limit = SIZES[device]
    model, tokenizer = build_model(shape, end_probability=6 / limit)
    engine = NativeEngine(
        model.to(device),
        end_tokens=[tokenizer.eos_token_id],
        decode=lambda tokens: "",
        compute=torch.bfloat16 if device == "cuda" else None,
    )
    asked = [
        Prompt(id=str(n), text="", tokens=tuple(tokenizer(text).input_ids))
        for n, text in enumerate(prompts(8 * count, ragged=True))
    ]
    given: dict[str, Any] = {
        "prompts": PromptCycle(asked, seed=0),
        "sampling": Sampling(max_new_tokens=limit),
        "prompts_per_step": count,
        "group_size": group,
        "seed": 0,
    }
    if partial == 1:
        return RolloutSource(engine, Unjudged(), **given).steps(10**6)
    ends, text = engine.end_tokens, engine.decode
    source = PartialSource(
        engine, Unjudged(), partial=partial, end_tokens=ends, decode=text, **given
    )
    return source.steps(10**6)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    set_threads(given.device)
    sources = {partial: batches(given.device, partial) for partial in PARTS}
    found: dict[int, list[tuple[float, int, int]]] = {partial: [] for partial in PARTS}
    for _ in range(WARM_UP + given.batches):
        for partial, source in sources.items():
            synchronize(given.device)
            begun = time.perf_counter()
            lengths = [len(rollout.tokens) for rollout in next(source).rollouts]
            taken = time.perf_counter() - begun
            found[partial].append((taken, sum(lengths), max(lengths)))
    shape, count, group, limit = SIZES[given.device]
    title = f"{shape}, {count} × {group} completions of at most {limit} tokens: medians"
    table = Table("parts", "s a batch", "to one", "tokens a batch", "tokens/s", title=title)
    base = statistics.median(taken for taken, *_ in found[1][WARM_UP:])
    for partial, rows in found.items():
        seconds, tokens, _ = (
            statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)
        )
        rate = sum(row[1] for row in rows[WARM_UP:]) / sum(row[0] for row in rows[WARM_UP:])
        cells = (f"{seconds:.3f}", f"{seconds / base:.2f}", f"{tokens:,.0f}", f"{rate:,.0f}")
        table.add_row(str(partial), *cells)
    Console(width=100).print(table)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
