"""Rows handed over from Python: prompts as a task, demonstrations and preferences as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.config import Resolved
from posttrain.config.paths import WORDS
from posttrain.config.preference_rules import READ_AS
from posttrain.data.conventions import understood
from posttrain.data.row_objects import hand_over, is_columnar, row_list
from posttrain.protocols import Split, Task
from posttrain.tasks import PromptTask, make_task
from posttrain.tasks.prompt_file import (
    answer_check,
    default_rewards,
    gold_answer,
    name_prompts,
    read_prompts,
)
from posttrain.types import Prompt

Rows = Iterable[str | Mapping[str, Any]]


def data_name(data: Any, *, name: str = "data") -> str:
    """What a recipe calls data: the path or hub id, or a name for rows that are handed over."""
    if isinstance(data, str | Path):
        return str(data)
    return hand_over(data, name=name)


def rows_task(
    task: str | Mapping[str, Any] | Task | None,
    *,
    prompts: str | Path | Rows | None,
    test_prompts: str | Path | Rows,
) -> Task | Mapping[str, Any] | None:
    """The task that was given, or one made of prompts; a task by name comes back as a table."""
    # Those of ``posttrain.evaluate`` are a test, and it calls them prompts.
    test_name = "prompts" if prompts is None else "test_prompts"
    train_rows, test_rows = _kept(prompts, name="prompts"), _kept(test_prompts, name=test_name)
    if task is not None:
        if prompts is not None or test_rows:
            raise ValueError("task: it brings its own prompts; give a task or prompts, not both")
        return {"name": task} if isinstance(task, str) else task
    if prompts is None and not test_rows:
        return None
    train = _prompts("train", train_rows, name="prompts") if prompts is not None else ()
    test = _prompts("test", test_rows, name=test_name) if test_rows else ()
    check = answer_check((*train, *test))
    shown = (train_rows, "prompts") if train else (test_rows, test_name)
    return PromptTask(
        name="prompts",
        told=understood("prompts", shown[0], name=shown[1]),
        rewards=default_rewards(check),
        train=train,
        test=test,
        solve=gold_answer,
        accuracy=check,
    )


def _kept(rows: Any, *, name: str) -> Any:
    """A path or a ``Dataset`` as it is; other rows as a list, for they are read twice."""
    if isinstance(rows, str | Path) or hasattr(rows, "column_names"):
        return rows
    if rows is None:
        return []
    found = row_list(rows, name=name)
    return found if is_columnar(found) else list(found)


def _prompts(split: Split, rows: Any, *, name: str) -> tuple[Prompt, ...]:
    return name_prompts(split, read_prompts(rows, name=name))


def has_test(task: Task | Mapping[str, Any] | None) -> bool:
    """Whether there are prompts to evaluate on."""
    made = make_task(dict(task)) if isinstance(task, Mapping) else task
    return made is not None and bool(made.prompts("test"))


def data_told(recipe: Resolved, task: Task | None) -> list[str]:
    """How what the stages learn from and are measured by was understood: a line for each source."""
    told = getattr(task, "told", "")
    asked = {"prefer", "rl", "eval"} & {*recipe.stages}
    lines = (
        [told] if told and (asked or ("sft" in recipe.stages and recipe.sft.data == "task")) else []
    )
    for stage, form in READ_AS.items():
        section: Any = getattr(recipe, stage) if stage in recipe.stages else None
        if section is not None and section.data not in WORDS:
            named = f"{stage}.data"
            lines.append(understood(form, section.data, columns=section.columns, name=named))
    return lines
