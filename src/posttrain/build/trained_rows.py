"""What a model of a run was trained on, so that no evaluation takes memory for skill."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.build.fingerprint import contents_digest
from posttrain.build.model_source import as_recorded
from posttrain.build.questions import alone, demonstrated, episodes, preferred, questions, spellings
from posttrain.config import Resolved
from posttrain.data.template import words
from posttrain.protocols import Task
from posttrain.registry import look_up, options
from posttrain.runs import RunFolder, rollout_table
from posttrain.runs.finished import run_of
from posttrain.runs.resume import BESIDE_RECIPE
from posttrain.tasks import TASKS, make_task
from posttrain.track.printable import command_line, printable
from posttrain.types import Prompt


def check_unseen(task: Task, model: str, *, chosen: bool = False, played: bool = False) -> None:
    """Refuse test problems that a model of a run, or one that it began from, was trained on.

    Those that someone has ``chosen`` by hand are evaluated, and it is said. Problems that are
    ``played`` in an environment are told apart by their columns, too.
    """
    run = _run_of(model)
    if run is None:
        return
    seen, test = trained_on(run, played=played), task.prompts("test")
    told = alone(test, among=(*task.prompts("train"), *test)) if played else test
    asked = zip((*told, *test), (*questions(told), *episodes(test)), strict=True)
    met = {prompt.id for prompt, ways in asked if not seen.isdisjoint(ways)}
    found = [prompt for prompt in test if prompt.id in met]
    if not found:
        return
    shown = printable(spellings(found[0])[0], limit=60)
    where = (
        f"{len(found)} of {len(test)} test problems were in the training data of {run} (the first: "
        f"{shown!r}), so the result"
    )
    if chosen:
        warnings.warn(f"prompts: {where} partly measures memory", stacklevel=3)
        return
    again = command_line("posttrain", "eval", run)
    raise ValueError(
        f"task: {where} would measure memory; evaluate as the run did ({again}), or on other "
        "problems"
    )


def asks_test(recipe: Resolved) -> bool:
    """Whether a run asks test prompts: only then could its numbers not be believed."""
    within = "rl" in recipe.stages and recipe.rl.evaluate_every
    return "eval" in recipe.stages or bool(within)


def check_has_test(task: Task, spec: Mapping[str, Any] | None) -> None:
    """Refuse a task without test problems, with what would give it some."""
    if not task.prompts("test"):
        raise ValueError(
            "task: there is nothing to evaluate on, because the test split is empty; "
            f"{how_to_test(spec)}"
        )


def how_to_test(spec: Mapping[str, Any] | None) -> str:
    """What gives a task test problems."""
    known = options(look_up(spec["name"], TASKS, kind="task")) if spec and "name" in spec else {}
    fixes = {
        "test_share": "hold out a share of its file, task.test_share = 0.2",
        "test_path": "name a file of test problems, task.test_path",
        "num_test": "raise task.num_test",
    }
    fix = ", or ".join(text for name, text in fixes.items() if name in known)
    return fix or "give the task test problems (from Python: test_prompts=…)"


def trained_on(
    run: Path, known: frozenset[Path] = frozenset(), *, played: bool = False
) -> set[str]:
    """The prompts that a run was trained on, and those of the runs that its model came from.

    What its task held out is not among the prompts of the task, but it may be among demonstrations
    of a file. For problems that are ``played``, prompts that were played too have their columns;
    of those that were objects, which no folder holds, nothing is known then.
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
    dpo = values.get("dpo", {}) if "dpo" in values["run"]["stages"] else {}
    task = _task(values, config)
    whole = played and values.get("task", {}).get("env") is not None
    seen: set[str] = set()
    sampled = "rl" in values["run"]["stages"]
    if sampled or sft.get("data") == "task" or dpo.get("data") == "prefer":
        if sampled and not whole and (task is None or _changed(values, config)):
            table = rollout_table(folder.stage("rl").rollouts, columns=["prompt"])
            seen |= {words(text) for text in table["prompt"].unique().to_pylist()}
        if task is not None:
            seen |= _all(task.prompts("train"), whole=whole)
    if task is not None:
        seen -= _all(task.prompts("test"), whole=whole)
    if Path(sft.get("data", "")).is_file():
        seen |= _all(
            demonstrated(sft["data"], sft.get("num_demonstrations"), columns=sft.get("columns"))
        )
    if Path(dpo.get("data", "")).is_file():
        seen |= _all(preferred(dpo["data"], columns=dpo.get("columns")))
    if began_from is not None and began_from not in known:
        seen |= trained_on(began_from, known | {run}, played=played)
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


def _all(prompts: Sequence[Prompt], *, whole: bool = False) -> set[str]:
    asked = episodes(prompts) if whole else questions(prompts)
    return {text for ways in asked for text in ways}
