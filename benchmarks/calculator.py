"""A calculator as a tool on GSM8K: answers that are right with it and without it, before and after.

    python benchmarks/calculator.py --model models/qwen05 --gsm8k data/gsm8k --seeds 0

The solutions of GSM8K's train.jsonl mark every calculation, ``<<48/2=24>>``. They become
demonstrations twice: with each mark as a call of the tool, and as plain text without the marks.
Both ways are a run of recipes/gsm8k.toml with an SFT stage in front of it, alike in everything but
the tool, each in a process of its own. One that is finished is not run again. Further options are
the recipe's, and every run's: --rl.steps 20. Printed, and written to results.json in the folder:
the share of test problems answered right, greedily, after SFT and after RL, and calls an episode.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.envs.calculator import Calculator
from posttrain.runs import RunFolder
from posttrain.tasks import make_task
from posttrain.types import Prompt

RECIPE = Path(__file__).parents[1] / "recipes" / "gsm8k.toml"
MARK = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
CALLS = "reward/part/env/tool_calls"
WAYS = {"tool": ("--task.env", "calculator"), "plain": ()}

Message = dict[str, Any]


def main() -> None:
    """Run what is not done, and print what came of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--demonstrations", type=int, default=3000)
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/calculator"))
    given, others = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts = make_task({"name": "gsm8k", "path": str(given.gsm8k)}).prompts("train")
    for way in WAYS:
        chats = demonstrations(prompts[: given.demonstrations], tool=way == "tool")
        text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
        (given.folder / f"{way}.jsonl").write_text(text, encoding="utf-8")
    jobs = [(way, seed) for seed in given.seeds for way in WAYS]
    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(lambda job: run(*job, given=given, others=others), jobs))
    rows = [row(way, seed, folder=given.folder) for way, seed in jobs]
    for found in rows:
        print(json.dumps(found))
    (given.folder / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def demonstrations(prompts: Sequence[Prompt], *, tool: bool) -> Iterator[list[Message]]:
    """The solutions as chats, with their calculations as calls or left to the text."""
    for prompt in prompts:
        steps, _, answer = prompt.columns["solution"].rpartition("####")
        text = steps + "\\boxed{" + answer.strip() + "}"
        asked: list[Message] = [{"role": "user", "content": prompt.text}]
        if not tool:
            yield [*asked, {"role": "assistant", "content": MARK.sub("", text)}]
        else:
            yield asked + calls(text)


def calls(text: str) -> list[Message]:
    r"""A solution with its marks as calls, and what the tool returns to them.

    >>> [one["role"] for one in calls("2+3 = <<2+3=5>>5 apples.\n\\boxed{5}")]
    ['assistant', 'tool', 'assistant']
    """
    found: list[Message] = []
    at = 0
    for mark in MARK.finditer(text):
        call = {"function": {"name": "calculate", "arguments": {"expression": mark[1].strip()}}}
        said = text[at : mark.start()].rstrip()
        found.append({"role": "assistant", "content": said, "tool_calls": [call]})
        found.append({"role": "tool", "content": Calculator().calculate(mark[1])})
        at = mark.end()
    return [*found, {"role": "assistant", "content": text[at:].lstrip()}]


def run(way: str, seed: int, *, given: argparse.Namespace, others: list[str]) -> None:
    """One run of the recipe, resumed where it was cut short; nothing where it is finished."""
    folder = given.folder / f"{way}-{seed}"
    if (folder / "run.json").exists() and RunFolder(folder).finished:
        return
    settings = {
        "--run.folder": folder,
        "--run.seed": seed,
        "--run.stages": "sft,rl,eval",
        "--model.name": given.model,
        "--task.path": given.gsm8k,
        "--sft.data": given.folder / f"{way}.jsonl",
        "--sft.epochs": 1,
        "--sft.batch_size": 64,
        "--sft.learning_rate": 1e-5,
    }
    command = [sys.executable, "-m", "posttrain", "run", str(RECIPE), "--resume"]
    command += [str(word) for pair in settings.items() for word in pair]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run([*command, *WAYS[way], *others], check=True, stdout=log, stderr=log)


def row(way: str, seed: int, *, folder: Path) -> dict[str, Any]:
    """What a run has come to."""
    run = RunFolder(folder / f"{way}-{seed}")
    summary = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    made = [record.get(CALLS) for record in run.stage("rl").records()]
    seen = [value for value in made if value is not None]
    return {
        "way": way,
        "seed": seed,
        "problems": summary["problems"],
        "before": summary["before"]["accuracy"],
        "after": summary["after"]["accuracy"],
        "calls": [seen[0], seen[-1]] if seen else None,
        "minutes": summary["seconds"] / 60,
    }


if __name__ == "__main__":
    main()
