"""A run with a million rollouts: seconds to open it, milliseconds for a page, memory.

    python benchmarks/store.py [--quick] [--steps 4000] [--rows 256] [--folder DIR] [--json FILE]

Makes the store (synthetic, 100 to 300 characters a completion), then opens it in fresh processes:
once without the index, which builds it, and then with it. Files are in the cache of the operating
system. A page is 50 rollouts; each is the slowest and the median of five that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from posttrain.runs import SCHEMA, Filter, Rollouts, rollout_file
from posttrain.runs.index import FILE_NAME
from posttrain.runs.rollouts import NEWER

GROUP = 8
POOL = 20_000  # different texts


def make_store(folder: Path, *, steps: int, rows: int) -> None:
    """Write step files as a run would, without waiting for the disk."""
    random = np.random.default_rng(0)
    words = np.array([f"word{i} " for i in range(3000)])
    texts = ["".join(random.choice(words, size=size)) for size in random.integers(14, 42, POOL)]
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        table = _step(step, rows, random=random, texts=texts)
        pq.write_table(table, rollout_file(folder, step), compression="zstd")


def _step(step: int, rows: int, *, random: np.random.Generator, texts: list[str]) -> pa.Table:
    lengths = random.integers(20, 80, rows)
    groups = np.arange(rows) // GROUP
    prompts = random.integers(0, 8000, rows // GROUP + 1)[groups]
    broken = random.random(rows) < 0.01
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = random.integers(0, 32_000, offsets[-1]).astype(np.int32)
    columns: dict[str, Any] = {
        "step": np.full(rows, step),
        "group": groups,
        "sample": np.arange(rows) % GROUP,
        "prompt_id": [f"train-{number}" for number in prompts],
        "prompt": [texts[number % POOL] for number in prompts],
        "completion": [texts[number] for number in random.integers(0, POOL, rows)],
        "prompt_tokens": pa.ListArray.from_arrays(offsets, tokens),
        "completion_tokens": pa.ListArray.from_arrays(offsets, tokens),
        "sampler_logprobs": pa.ListArray.from_arrays(
            offsets, -random.exponential(size=offsets[-1]).astype(np.float32)
        ),
        "reward": random.random(rows).round(3),
        "state": np.where(broken, "crashed", "ok"),
        "reason": np.where(broken, "ValueError: no", ""),
        "parts": [[("answer", 1.0)]] * rows,
        "advantage": random.normal(size=rows),
        "version": np.full(rows, step - 1),
        "stop_reason": np.where(random.random(rows) < 0.1, "length", "stop"),
        "length": lengths,
        **dict.fromkeys(NEWER, [None] * rows),
    }
    arrays = [
        pa.array(columns[field.name]).cast(field.type)
        if field.name not in ("parts", *NEWER)
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def peak_mb() -> float:
    """The most memory this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def measure(folder: Path, *, search: bool) -> dict[str, float]:
    """In a fresh process: open the store, ask for pages."""
    before = peak_mb()
    started = time.perf_counter()
    store = Rollouts(folder)
    found = {"open_s": time.perf_counter() - started, "rollouts": float(len(store))}
    last = store.steps[-1]
    pages: dict[str, Callable[[int], Any]] = {
        "filtered": lambda i: store.page(
            Filter(first_step=last * i // 10, min_reward=0.9, stop_reason="length"), offset=100 * i
        ),
        "broken": lambda i: store.page(Filter(state="broken", group=i)),
        "best": lambda i: store.page(sort="reward", descending=True, offset=50 * i),
        "worst_of_prompt": lambda i: store.page(Filter(prompt_id=f"train-{i}"), sort="reward"),
        "deep": lambda i: store.page(sort="advantage", offset=len(store) // 2 + i),
        "last": lambda i: store.page(sort="step", descending=True, offset=50 * i),
    }
    for name, page in pages.items():
        times = []
        for number in range(5):
            started = time.perf_counter()
            page(number)
            times.append(1000 * (time.perf_counter() - started))
        found |= {f"{name}_ms": statistics.median(times), f"{name}_worst_ms": max(times)}
    found |= {"peak_mb": peak_mb(), "before_mb": before}
    if search:
        for name in ("search_s", "search_again_s"):
            started = time.perf_counter()
            store.page(Filter(text="WORD77 word1"))
            found[name] = time.perf_counter() - started
    return found


def in_fresh_process(folder: Path, *, search: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(folder), *(["--search"] * search)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def report(built: dict[str, float], opened: dict[str, float], *, sizes: dict[str, int]) -> Table:
    title = f"A store of {opened['rollouts']:,.0f} rollouts"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("", "without an index", "with it"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("open", f"{built['open_s']:.2f} s", f"{opened['open_s']:.3f} s")
    labels = {
        "filtered": "steps from, reward above, cut off",
        "broken": "broken, one group",
        "best": "best rewards first",
        "worst_of_prompt": "one prompt, worst first",
        "deep": "by advantage, from the middle on",
        "last": "last steps first",
    }
    for name, label in labels.items():
        cells = (f"{r[name + '_ms']:.0f} ({r[name + '_worst_ms']:.0f}) ms" for r in (built, opened))
        table.add_row(f"page: {label}", *cells)
    table.add_row("page: text search, all files", "", f"{opened['search_s']:.1f} s")
    table.add_row("its next page", "", f"{1000 * opened['search_again_s']:.0f} ms")
    peaks = (f"{r['peak_mb']:,.0f} MB ({r['before_mb']:,.0f} before)" for r in (built, opened))
    table.add_row("peak memory of the process", *peaks)
    table.add_row(
        "on disk", f"{sizes['files'] / 2**20:,.0f} MB", f"{sizes['index'] / 2**20:+,.0f} MB"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a hundredth of it")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=256, help="rollouts of a step")
    parser.add_argument("--folder", type=Path, help="keep the store there, or use the one there is")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--search", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, search=options.search)))
        return
    steps = options.steps // 100 if options.quick else options.steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / "rollouts"
        if not folder.exists():
            print(f"writing {steps:,} steps of {options.rows} rollouts …", flush=True)
            make_store(folder, steps=steps, rows=options.rows)
        (folder / FILE_NAME).unlink(missing_ok=True)
        built = in_fresh_process(folder, search=False)
        opened = in_fresh_process(folder, search=True)
        size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        sizes = {"files": size, "index": (folder / FILE_NAME).stat().st_size}
    Console(width=100).print(report(built, opened, sizes=sizes))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, pyarrow {pa.__version__}")
    if options.json:
        found = {"built": built, "opened": opened, "bytes": sizes}
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
