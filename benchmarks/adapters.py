"""Several adapters in one run against one: the time of a step, its parts, and the memory.

    python benchmarks/adapters.py --device cuda --json adapters.json
    python benchmarks/adapters.py --device cpu --model tiny --prompts 8 --new-tokens 32

Each number of adapters is a process of its own, GRPO on random letters, with completions of fixed
length (the end token has no probability) and a learning rate that changes nothing. A step is that
of all adapters: sampling and grading of all together, then learning of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RATE = 1e-12  # all the work of learning, and completions that stay as they were


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def measure(asked: argparse.Namespace, number: int, folder: Path) -> dict[str, Any]:
    """Train ``number`` adapters at once, and what a step of them took."""
    from bench_models import prompts
    from grpo_steps import peak

    import posttrain  # before torch: OpenMP reads but once how its threads are to wait

    def reward(completion: str) -> float:
        return sum(map(ord, completion)) % 17 / 17

    done = posttrain.rl(
        model=folder / "model",
        prompts=prompts(asked.prompts * 4, ragged=False),
        reward=reward,
        grading={"workers": 0},
        model_options={"compile": asked.device == "cuda"},
        run_options={"device": asked.device, "save_minutes": 0.0},
        adapter={"rank": asked.rank},
        folder=folder / f"adapters-{number}",
        adapters=number,
        algorithm="grpo",
        kl={"placement": "none"},
        steps=asked.warmup + asked.steps,
        prompts_per_step=asked.prompts,
        group_size=asked.group,
        max_new_tokens=asked.new_tokens,
        learning_rate=RATE,
        check="off",
    )
    runs = done.adapters or [done]
    rows = [run.metrics().to_pylist()[asked.warmup :] for run in runs]
    tokens = sum(statistics.median(row["rollout/tokens"] for row in mine) for mine in rows)
    # All adapters wait for each other, so a step of the first is a step of all.
    step = statistics.median(row["time/step"] for row in rows[0])
    learning = sum(statistics.median(row["time/train"] for row in mine) for mine in rows)
    return {
        "adapters": number,
        "seconds": step,
        "learning": learning,
        "tokens": tokens,
        "longest": max(row["time/step"] for row in rows[0]),
        **peak(asked.device),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, against the first."""
    lines = [
        "| adapters | a step, s | to one | sampling and grading, s | learning, s | tokens/s "
        "| peak, GiB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        times = row["seconds"] / rows[0]["seconds"]
        rest = row["seconds"] - row["learning"]
        lines.append(
            f"| {row['adapters']} | {row['seconds']:.2f} | {times:.2f} × | {rest:.2f} | "
            f"{row['learning']:.2f} | {row['tokens'] / row['seconds']:,.0f} | "
            f"{row['peak'] / 2**30:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure each number of adapters in a process of its own, and print the table."""
    asked = arguments()
    if asked.one is not None:
        print(json.dumps(measure(asked, asked.one, asked.folder)))
        return
    from bench_models import write_model

    rows = []
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place) / "model", shape=asked.model)
        for number in asked.adapters:
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--one", str(number), "--folder", place]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(found.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr)
    print(table(rows))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"asked": sys.argv[1:], "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
