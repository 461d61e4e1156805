"""``posttrain reproduce``: run a published result again, and say whether it comes out the same."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from posttrain.config import Recipe, recipe_from_dict
from posttrain.track.progress import loading
from posttrain.track.safe_terminal import Terminal, say

RESULTS = Path(__file__).parents[1] / "results"  # published results, written by benchmarks/seeds.py
KEYS = {"name", "recipe", "about", "hardware", "problems", "mean", "interval", "config", "seeds"}
FAR = 3.291  # standard errors that hold 99.9 % of all shares
Result = Mapping[str, Any]


def list_results() -> None:
    """Print the published results, with their hardware and minutes."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("result", no_wrap=True)  # to be typed next
    for heading in ("accuracy", "one run, 95%", "minutes", "hardware"):
        table.add_column(heading, overflow="fold")
    for path in sorted(RESULTS.glob("*.json")):
        found = read_result(path)
        shown = [found["name"], _share(found["mean"])]
        shown += [_interval(found), f"{_minutes(found):.1f}", found["hardware"]]
        table.add_row(*map(str, shown))
    console = Terminal()
    console.print(table)
    console.print("posttrain reproduce NAME runs one here", soft_wrap=True)


def reproduce(name: str, *, seed: int | None, out: Path | None, model: str | None) -> int:
    """Run a result's recipe with a seed of its own; 0 where it falls into the interval, else 1."""
    found = find_result(name)
    published = [each["seed"] for each in found["seeds"]]
    if seed is None:  # the interval predicts a run with a new seed
        seed = next(number for number in range(len(published) + 1) if number not in published)
    folder = out or Path("runs") / f"reproduce-{found['name']}-{seed}"
    recipe = recipe_of(found, seed=seed, folder=folder, model=model)
    console = Terminal()
    with loading(console):
        from posttrain.stages.run import run
    console.print(
        f"{found['name']}: seed {seed}, into {folder}; took {_minutes(found):.1f} minutes on "
        f"{found['hardware']}",
        soft_wrap=True,
    )
    begun = any(folder.glob("*/begun.json"))  # a stage has begun, so there is something to resume
    try:
        summary = run(recipe, console=console, resume=begun).summary
    except ValueError as error:
        if recipe.model.name == "tiny" or Path(recipe.model.name).expanduser().exists():
            raise
        head = "\n".join(f"  {line}" for line in found["about"])
        raise ValueError(
            f"{error}\n{found['recipe']} says how to get what it needs:\n{head}\n"
            "A model folder of another name is given with --model FOLDER"
        ) from None
    text, inside = verdict(found, summary)
    say(text)
    return 0 if inside else 1


def find_result(name: str) -> Result:
    """A result by its name, or from a user's own file."""
    known = {path.stem: path for path in RESULTS.glob("*.json")}
    path = Path(name) if name.endswith(".json") else known.get(name)
    if path is None:
        raise ValueError(f"{name!r}: no such result; there are: {', '.join(sorted(known))}")
    return read_result(path)


def read_result(path: Path) -> Result:
    """What ``benchmarks/seeds.py`` has written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError:
        found = {}
    if isinstance(found, dict) and found.keys() >= KEYS and found["interval"] is not None:
        return found
    raise ValueError(
        f"{path}: not a result of two seeds or more; benchmarks/seeds.py --result NAME writes one"
    )


def recipe_of(found: Result, *, seed: int, folder: Path, model: str | None = None) -> Recipe:
    """The recipe of a result, with every default as it was then."""
    config = found["config"]
    run = {**config["run"], "seed": seed, "folder": str(folder)}
    named = {**config["model"], **({"name": model} if model else {})}
    return recipe_from_dict({**config, "run": run, "model": named}, name=found["name"])


def verdict(found: Result, summary: Mapping[str, Any]) -> tuple[str, bool]:
    """A run beside what was published, in words, and whether it comes out the same.

    It does where its accuracy falls into the interval, from a start that was the published one.
    """
    _check_counted(found, summary)
    accuracy, (low, high) = summary["accuracy_after"], found["interval"]
    seeds = ", ".join(str(each["seed"]) for each in found["seeds"])
    shares = ", ".join(f"{100 * each['after']:.1f}" for each in found["seeds"])
    inside = low <= accuracy <= high
    where = "inside" if inside else f"outside, {'above' if accuracy > high else 'below'},"
    other = _other_start(found, summary.get("accuracy_before"))
    return (
        f"{found['name']}, seed {summary['seed']}: {_share(accuracy)} of {summary['problems']:,} "
        f"problems right (greedy), {summary['seconds'] / 60:.1f} minutes on {summary['hardware']}\n"
        f"published: {_share(found['mean'])} of {found['problems']:,}, mean of the seeds {seeds} "
        f"({shares}), {_minutes(found):.1f} minutes each on {found['hardware']}\n"
        f"{where} of the published interval for one run, {_interval(found)}{other}"
    ), inside and not other


def _check_counted(found: Result, summary: Mapping[str, Any]) -> None:
    """Refuse a run whose accuracy does not count what the published one counts."""
    reason = summary.get("invalid_reason")
    if "accuracy_after" not in summary:
        raise ValueError(f"{found['name']}: the run has no accuracy: {reason}")
    if summary.get("problems") != found["problems"]:
        raise ValueError(
            f"{found['name']}: the run was evaluated on {summary.get('problems')} problems, and "
            f"published are {found['problems']}; give it the same data"
        )
    if summary.get("invalid_after") != 0:
        raise ValueError(
            f"{found['name']}: not every answer could be graded, and the accuracy is of the others "
            f"alone: {reason}"
        )


def _other_start(found: Result, before: float | None) -> str:
    """A message where a run began too far from where the published ones began; else "".

    Too far is outside a 99.9 % binomial interval around the seeds' range: ``3.291·√(q(1 − q)/N)``
    beyond it; n seeds, N problems, p their mean, q = (nNp + 1)/(nN + 2) with add-one smoothing.
    """
    known = [each["before"] for each in found["seeds"] if each["before"] is not None]
    if before is None or not known:
        return ""
    num, mean = len(known) * found["problems"], statistics.fmean(known)
    shrunk = (num * mean + 1) / (num + 2)
    half = FAR * math.sqrt(shrunk * (1 - shrunk) / found["problems"])
    low, high = max(0.0, min(known) - half), min(1.0, max(known) + half)
    if low <= before <= high:
        return ""
    return (
        f"\nbut other weights or data: before RL {_share(before)} were right, published "
        f"{_share(mean)}, and the same start gives {100 * low:.1f} to {_share(high)}"
    )


def _minutes(found: Result) -> float:
    return statistics.fmean(each["minutes"] for each in found["seeds"])


def _interval(found: Result) -> str:
    low, high = found["interval"]
    return f"{100 * low:.1f} to {_share(high)}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
