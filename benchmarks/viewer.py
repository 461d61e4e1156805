"""The page over a million rollouts: milliseconds for a page of it, memory of the server.

    python benchmarks/viewer.py [--steps 4000] [--rows 256] [--folder DIR] [--json FILE]

Makes a run with such a store (benchmarks/store.py), starts ``posttrain view`` on it and asks what
the page asks, over HTTP. The index is there, as a run leaves it. A page is ten groups; of five
that differ the slowest counts. Needs the extra ``view``, and Linux to read the server's memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from store import make_store

from posttrain.runs import Rollouts, RunFolder

PAGES = {
    "groups, the first page": "groups?run=big&limit=10&offset={}",
    "groups, filtered by reward and end": (
        "groups?run=big&limit=10&min_reward=0.9{}&stop_reason=length&first_step={}00"
    ),
    "groups, by spread of rewards": "groups?run=big&limit=10&sort=spread&descending=1&offset={}0",
    "groups of one prompt": "groups?run=big&limit=10&prompt_id=train-{}",
    "groups with a broken score": "groups?run=big&limit=10&state=broken&offset={}0",
    "prompts that are never solved": "prompts?run=big&limit=50&unsolved=1&offset={}",
    "tokens of a rollout": "rollout?run=big&step={}1&group=0&sample=0",
}


def make_run(folder: Path, *, steps: int, rows: int) -> None:
    """A run folder with metrics and rollouts, and their index."""
    run = RunFolder.create(folder, config={"rl": {"steps": steps, "algorithm": "grpo"}})
    stage = run.begin("rl")
    random = np.random.default_rng(0)
    names = ("reward/mean", "rollout/length", "objective/entropy", "policy/approx_kl")
    lines = [
        {"step": step, **dict.fromkeys(names, random.random())} for step in range(1, steps + 1)
    ]
    stage.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_store(stage.rollouts, steps=steps, rows=rows)
    Rollouts(stage.rollouts)


def measure(folder: Path) -> dict[str, float]:
    """Start the server, and ask."""
    command = [sys.executable, "-m", "posttrain", "view", str(folder), "--no-browser"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.match(r"(http://\S+:(\d+))/\?token=(\S+)", server.stdout.readline())
            assert address is not None
            base, port, token = address.groups()

            def ask(path: str) -> float:
                headers = {"Cookie": f"posttrain-{port}={token}"}
                request = urllib.request.Request(f"{base}/{path}", headers=headers)
                begun = time.perf_counter()
                with urllib.request.urlopen(request) as answer:
                    answer.read()
                return 1000 * (time.perf_counter() - begun)

            for _ in range(200):
                try:
                    ask("")
                    break
                except OSError:
                    time.sleep(0.05)
            found = {"seconds until the server answers": time.perf_counter() - started}
            first = ["", "app.js", "app.css", "api/runs", "api/charts?run=big&stage=rl"]
            found["ms, first page: overview"] = sum(map(ask, first))
            found["ms, first page: groups, opening the store"] = ask("api/groups?run=big&limit=10")
            for name, path in PAGES.items():
                times = [ask("api/" + path.replace("{}", str(n))) for n in range(1, 6)]
                found[f"ms, {name}, slowest of 5"] = max(times)
            found["s, text search of all (reads all files)"] = (
                ask("api/groups?run=big&limit=10&text=word77+word3") / 1000
            )
            status = Path(f"/proc/{server.pid}/status").read_text()
            found["MB, most memory of the server"] = (
                int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
            )
            return found
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.folder or Path(scratch)) / "big"
        if not folder.exists():
            make_run(folder, steps=asked.steps, rows=asked.rows)
        found = {"rollouts": float(asked.steps * asked.rows), **measure(folder)}
    for name, value in found.items():
        print(f"{name:<55} {value:>12,.1f}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
