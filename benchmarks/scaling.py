"""How a step's time grows with prompts, group size, completion length and model size.

    python benchmarks/scaling.py --device cpu --quick --plot scaling.png
    python benchmarks/scaling.py --device cuda --quick --json scaling.json --plot scaling.png

A step is one of GRPO: sampling with our engine, then collating, advantages and one optimiser step
(forward and backward) of LocalLearner. One size grows at a time, the others stay at their base; no
completion ends by itself, and the learning rate is 0, so every round does the same work. The first
round is not counted, the median of the others is.

The exponent k of ``time ∝ size^k`` is a least-squares line through the logarithms; 1.0 is linear.
Beside it stands the exponent that counting operations gives, for the same sizes:

* sampling: ``2·W`` a token, ``4·L·H·D·n`` for one that looks at n others; prompts are read once
* learning: three times that of a forward pass over prompts (once a group) and completions

with W weights, L layers, H heads of size D. So prompts and weights count 1; groups and lengths less
where the prompt, which is read once, is most of the work; long completions between 1 and 2. A
measured exponent below the counted one says that the device was not full: fixed costs, or weights
read for few rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_models import NEVER, prompts, set_end
from rich.console import Console
from rich.table import Table
from roofline import Shape, synchronize

from posttrain.algorithms.advantages import group_normalised
from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import token_mean
from posttrain.data.collate import collate
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.tiny import build_tiny
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.rl import optimise, prepare
from posttrain.rollout.engines.native import NativeEngine
from posttrain.types import Prompt, Rollout, Sampling, Score

PHASES = ("sampling", "learning")
AXES = {
    "prompts": "prompts a step",
    "group": "completions a prompt",
    "length": "tokens a completion",
    "hidden": "weights",
}
PLAN = Plan(advantage=group_normalised, loss=clipped, weights=token_mean)
PROMPT_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of everything; ``hidden`` is the width of the model."""

    prompts: int
    group: int
    length: int
    hidden: int
    layers: int

    @property
    def tokens(self) -> int:
        """Sampled in a step."""
        return self.prompts * self.group * self.length


def series(device: str, *, quick: bool) -> tuple[Point, dict[str, list[int]]]:
    """The base, and the sizes that each axis takes."""
    if device == "cpu":
        base = Point(prompts=4, group=4, length=32, hidden=128, layers=2)
        steps = 3 if quick else 5
        starts = {"prompts": 4, "group": 4, "length": 16, "hidden": 64}
        return base, {axis: [first * 2**n for n in range(steps)] for axis, first in starts.items()}
    base = Point(prompts=16, group=8, length=128, hidden=1024, layers=8)
    steps, factor = (3, 4) if quick else (5, 2)
    starts = {"prompts": 16, "group": 8, "length": 64, "hidden": 256}
    sizes = {axis: [first * factor**n for n in range(steps)] for axis, first in starts.items()}
    return base, {**sizes, "hidden": [starts["hidden"] * 2**n for n in range(4)]}


class Bench:
    """A model of one width with its engine and learner: what a step needs."""

    def __init__(self, point: Point, device: str) -> None:
        cuda = device == "cuda"
        heads = max(1, point.hidden // 64)
        model, tokenizer = build_tiny(
            hidden_size=point.hidden, num_layers=point.layers, num_heads=heads, max_positions=2048
        )
        set_end(model.eval(), tokenizer.eos_token_id, probability=NEVER)
        self._device = device
        self._tokenizer = tokenizer
        self.shape = Shape.of(model)
        model.to(device)
        self._engine = NativeEngine(
            model,
            end_tokens=[tokenizer.eos_token_id],
            decode=lambda tokens: "",
            compute=torch.bfloat16 if cuda else None,
        )
        self._learner = LocalLearner(
            model,
            adamw(model, learning_rate=0.0),
            save=lambda folder: None,
            compute=torch.bfloat16 if cuda else torch.float32,
        )

    def measure(self, point: Point, *, rounds: int) -> dict[str, float]:
        """Median seconds of both phases."""
        texts = prompts(point.prompts, ragged=False)
        asked = [
            Prompt(id=str(n), text=text, tokens=tuple(self._tokenizer(text).input_ids))
            for n, text in enumerate(texts)
        ]
        taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for seed in range(rounds + 1):
            times = [self._now()]
            found = self._engine.generate(
                asked, Sampling(max_new_tokens=point.length), num_samples=point.group, seed=seed
            )
            times.append(self._now())
            self._learn(asked, found)
            times.append(self._now())
            for phase, began, ended in zip(PHASES, times, times[1:], strict=False):
                taken[phase].append(ended - began)
        return {phase: statistics.median(all_of[1:]) for phase, all_of in taken.items()}

    def _learn(self, asked: Sequence[Prompt], found: Sequence[Sequence[Rollout]]) -> None:
        """All that the loop does between two samplings."""
        rollouts = [
            Rollout(prompt=prompt, turns=(one,), group=number, score=Score(value=float(place)))
            for number, (prompt, group) in enumerate(zip(asked, found, strict=True))
            for place, one in enumerate(group)
        ]
        state = State(kl=PLAN.kl)
        batch = collate(rollouts, pad_token=self._tokenizer.pad_token_id)
        batch = prepare(batch, self._learner, plan=PLAN, state=state)
        optimise(batch, self._learner, plan=PLAN, state=state, seed=0)

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


def operations(shape: Shape, point: Point) -> dict[str, float]:
    """Operations of a step by phase, as in the docstring of this file; prompts have p tokens.

    With P prompts, G completions each, of n tokens, ``a = 4·L·H·D``:
    sampling ``P·(2·W·p + a·p²/2) + P·G·(2·W·n + a·(p·n + n²/2))``, learning three times as much.
    """
    per_pair = 4 * shape.layers * shape.heads * shape.head_size
    p, n = PROMPT_TOKENS, point.length
    read = 2 * shape.weights * p + per_pair * p * p / 2
    written = 2 * shape.weights * n + per_pair * (p * n + n * n / 2)
    forward = point.prompts * (read + point.group * written)
    return {"sampling": forward, "learning": 3 * forward}


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The slope of log time over log size, by least squares.

    >>> round(exponent([1, 2, 4, 8], [3, 12, 48, 192]), 6)  # 3·size²
    2.0
    """
    over, up = [math.log(size) for size in sizes], [math.log(time) for time in times]
    middle = statistics.mean(over)
    spread = sum((x - middle) ** 2 for x in over)
    return sum((x - middle) * y for x, y in zip(over, up, strict=True)) / spread


def run_axis(axis: str, sizes: Sequence[int], *, base: Point, given: Any) -> list[dict[str, Any]]:
    """The points of one axis."""
    rows, bench = [], Bench(replace(base, **{axis: sizes[0]}), given.device)
    for size in sizes:
        point = replace(base, **{axis: size})
        if axis == "hidden" and rows:
            bench = Bench(point, given.device)
        seconds = bench.measure(point, rounds=2 if given.quick else 4)
        work = operations(bench.shape, point)
        rows.append(
            {
                **asdict(point),
                "axis": axis,
                "size": bench.shape.weights if axis == "hidden" else size,
                "seconds": seconds,
                "operations": work,
                "microseconds_per_token": {p: seconds[p] / point.tokens * 1e6 for p in PHASES},
            }
        )
        print(f"{axis} {rows[-1]['size']:,}: {seconds}", flush=True)
    return rows


def fit(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each axis and phase: the exponent measured, that of the last two sizes, that counted."""
    found = []
    for axis in AXES:
        own = [row for row in rows if row["axis"] == axis]
        sizes = [row["size"] for row in own]
        for phase in PHASES:
            times = [row["seconds"][phase] for row in own]
            work = [row["operations"][phase] for row in own]
            slopes = {"exponent": exponent(sizes, times), "counted": exponent(sizes, work)}
            last = exponent(sizes[-2:], times[-2:])
            found.append({"axis": axis, "phase": phase, **slopes, "last_two": last})
    return found


def show(rows: Sequence[Mapping[str, Any]], fits: Sequence[Mapping[str, Any]]) -> None:
    """The table: cost per token over the sizes, and the exponents."""
    titles = ("size", "phase", "from … to", "µs per token", "exponent", "last two", "counted")
    table = Table(*titles, title="Time of a step ∝ size^exponent; 1.0 is linear")
    for one in fits:
        own = [row for row in rows if row["axis"] == one["axis"]]
        costs = [f"{row['microseconds_per_token'][one['phase']]:,.3g}" for row in own]
        table.add_row(
            AXES[one["axis"]],
            one["phase"],
            f"{own[0]['size']:,} … {own[-1]['size']:,}",
            "  ".join(costs),
            *(f"{one[key]:.2f}" for key in ("exponent", "last_two", "counted")),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def draw(rows: Sequence[Mapping[str, Any]], fits: Sequence[dict[str, Any]], *, path: Path) -> None:
    """Four panels, one for each size: cost per token, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharey=True)
    for panel, (axis, title) in zip(panels.flat, AXES.items(), strict=True):
        own = [row for row in rows if row["axis"] == axis]
        sizes = [row["size"] for row in own]
        for phase, marker in zip(PHASES, "os", strict=True):
            one = next(fit for fit in fits if (fit["axis"], fit["phase"]) == (axis, phase))
            costs = [row["microseconds_per_token"][phase] for row in own]
            name = f"{phase}: time ∝ size^{one['exponent']:.2f} (counted {one['counted']:.2f})"
            panel.loglog(sizes, costs, marker=marker, label=name)
        panel.set_xlabel(title)
        names = [f"{size / 1e6:,.{size < 1e7:d}f}M" if size > 1e5 else str(size) for size in sizes]
        panel.set_xticks(sizes, names)
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="upper left", frameon=False)
    low, high = panels[0, 0].get_ylim()
    panels[0, 0].set_ylim(low, high * (high / low) ** 0.3)  # room for the legends above the lines
    figure.supylabel("µs per sampled token")
    figure.suptitle("Cost of a step, one size growing at a time")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", type=Path, help="write points and exponents to this file")
    parser.add_argument("--plot", type=Path, help="draw the four panels into this file")
    given = parser.parse_args()
    began = time.perf_counter()
    base, sizes = series(given.device, quick=given.quick)
    rows = [row for axis in AXES for row in run_axis(axis, sizes[axis], base=base, given=given)]
    fits = fit(rows)
    if given.json:
        device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        report = {"device": device, "base": asdict(base), "points": rows, "fits": fits}
        given.json.write_text(json.dumps(report, indent=1))
    if given.plot:
        draw(rows, fits, path=given.plot)
    show(rows, fits)
    print(f"base: {base}; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
