"""What a model of a run was trained on, so that no evaluation takes memory for skill."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.build.fingerprint import contents_digest
from posttrain.build.places import as_recorded
from posttrain.build.resume import BESIDE_RECIPE
from posttrain.build.sources import run_of
from posttrain.config import Recipe
from posttrain.data.preferences import read_preferences
from posttrain.data.sources import read_demonstrations
from posttrain.protocols import Task
from posttrain.registry import look_up, options
from posttrain.runs import RunFolder, rollout_table
from posttrain.tasks import TASKS, make_task
from posttrain.track.text import command_line, printable
from posttrain.types import Prompt

APART = "remove them there, or the test measures memory"


def check_unseen(task: Task, model: str, *, chosen: bool = False) -> None:
    """Refuse test problems that a model of a run, or one that it began from, was trained on.

    Those that someone has ``chosen`` by hand are evaluated, and it is said.
    """
    run = _run_of(model)
    if run is None:
        return
    seen = trained_on(run)
    test, found = task.prompts("test"), _among(task, seen)
    if not found:
        return
    shown = printable(_spellings(found[0])[0], limit=60)
    told = (
        f"{len(found)} of {len(test)} test problems were in the training data of {run} (the first: "
        f"{shown!r}), so the result"
    )
    if chosen:
        warnings.warn(f"prompts: {told} is in part that of memory", stacklevel=3)
        return
    again = command_line("posttrain", "eval", run)
    raise ValueError(
        f"task: {told} would measure memory; evaluate as the run did ({again}), or on other "
        "problems"
    )


def tests_in_demonstrations(recipe: Recipe, task: Task) -> list[Prompt]:
    """The test problems of a task that the stage sft would learn from a file."""
    section = recipe.sft
    if section is None or "sft" not in recipe.stages or section.data == "task":
        return []
    return _among(task, _shown(section.data, section.num_demonstrations))


def tests_in_preferences(recipe: Recipe, task: Task) -> list[Prompt]:
    """The test problems of a task that a reward model would learn from a file."""
    section = recipe.reward
    if section is None or "reward" not in recipe.stages or section.data == "prefer":
        return []
    with warnings.catch_warnings():  # they are given when the stage reads them
        warnings.simplefilter("ignore")
        rows = read_preferences(section.data)
    return _among(task, {_words(row.prompt or _asked(row.messages)) for row in rows})


def asks_test(recipe: Recipe) -> bool:
    """Whether a run asks test prompts: only then could its numbers not be believed."""
    within = "rl" in recipe.stages and recipe.rl is not None and recipe.rl.evaluate_every
    return "eval" in recipe.stages or bool(within)


def check_demonstrations_apart(recipe: Recipe, task: Task | None) -> None:
    """Refuse to train on demonstrations of the very problems that the run is measured by."""
    found = tests_in_demonstrations(recipe, task) if task is not None and asks_test(recipe) else []
    if task is not None and found:
        raise ValueError(f"sft.data: {told_leak(found, task, where='sft.data')}; {APART}")


def told_leak(found: Sequence[Prompt], task: Task, *, where: str) -> str:
    """How many test problems are in a file, and the first of them."""
    shown = printable(_spellings(found[0])[0], limit=60)
    num = len(task.prompts("test"))
    return f"{len(found)} of {num} held-out problems are in {where} (the first: {shown!r})"


def check_has_test(task: Task, spec: Mapping[str, Any] | None) -> None:
    """Refuse a task without test problems, with what would give it some."""
    if task.prompts("test"):
        return
    known = options(look_up(spec["name"], TASKS, kind="task")) if spec else {}
    fixes = {
        "test_share": "hold out a share of its file, task.test_share = 0.2",
        "test_path": "name a file of test problems, task.test_path",
        "num_test": "raise task.num_test",
    }
    fix = ", or ".join(text for name, text in fixes.items() if name in known)
    raise ValueError(
        f"task: there is nothing to evaluate on, because the test split is empty; "
        f"{fix or 'give the task test problems (from Python: test_prompts=…)'}"
    )


def trained_on(run: Path, known: frozenset[Path] = frozenset()) -> set[str]:
    """The prompts that a run was trained on, and those of the runs that its model came from.

    What its task held out is not among the prompts of the task, but it may be among demonstrations
    of a file.
    """
    folder = RunFolder(run)
    if not (run / "config.json").exists():
        return set()
    config = folder.config
    values = {name: table for name, table in config.items() if name not in BESIDE_RECIPE}
    began_from = _run_of(values["model"]["name"])
    as_recorded(values, folder)
    began_from = _run_of(values["model"]["name"]) or began_from
    sft = values.get("sft", {}) if "sft" in values["run"]["stages"] else {}
    task = _task(values, config)
    seen: set[str] = set()
    if "rl" in values["run"]["stages"] or sft.get("data") == "task":
        if task is None or _changed(values, config):
            table = rollout_table(folder.stage("rl").rollouts, columns=["prompt"])
            seen |= {_words(text) for text in table["prompt"].unique().to_pylist()}
        if task is not None:
            seen |= _all(task.prompts("train"))
    if task is not None:
        seen -= _all(task.prompts("test"))
    if Path(sft.get("data", "")).is_file():
        seen |= _shown(sft["data"], sft.get("num_demonstrations"))
    if began_from is not None and began_from not in known:
        seen |= trained_on(began_from, known | {run})
    return seen


def _run_of(model: str) -> Path | None:
    path = Path(model).expanduser()
    return run_of(path) if path.exists() else None


def _task(values: Mapping[str, Any], config: Mapping[str, Any]) -> Task | None:
    """The task of a run; None where it has none, or where its files are gone."""
    if "task" not in values or "task" in config.get("supplied", {}):
        return None
    try:
        return make_task(values["task"])
    except (OSError, ValueError):
        return None


def _changed(values: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a file of the task is another one by now."""
    then = config.get("contents", {})
    now = {f"task.{key}": value for key, value in values["task"].items()}
    return any(contents_digest(now.get(key)) != then[key] for key in then if key in now)


def _all(prompts: Any) -> set[str]:
    return {text for prompt in prompts for text in _spellings(prompt)}


def _spellings(prompt: Prompt) -> list[str]:
    """How a question may be written down: what the user says, and a chat as rollouts keep it."""
    chat = [f"{turn['role']}: {turn['content']}" for turn in prompt.messages]
    texts = [_words(text) for text in (prompt.text, _asked(prompt.messages), "\n".join(chat))]
    return [text for text in texts if text]


def _among(task: Task, seen: set[str]) -> list[Prompt]:
    """The test problems of a task that are among these questions."""
    return [prompt for prompt in task.prompts("test") if not seen.isdisjoint(_spellings(prompt))]


def _shown(path: str, most: int | None) -> set[str]:
    """The questions of the demonstrations in a file, of the first so many."""
    with warnings.catch_warnings():  # they are given when the stage reads them
        warnings.simplefilter("ignore")
        rows = read_demonstrations(path)[:most]
    return {
        _words(_asked(row["messages"]) if "messages" in row else str(row["prompt"])) for row in rows
    }


def _asked(messages: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(turn["content"] for turn in messages if turn["role"] == "user")


def _words(text: str) -> str:
    """White space does not make another question."""
    return " ".join(text.split())
