"""Prompts handed over from Python, as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.protocols import Task
from posttrain.tasks import PromptTask, make_task
from posttrain.tasks.jsonl import jsonl_task
from posttrain.types import Prompt

Rows = Sequence[str | Mapping[str, Any]]


def rows_task(
    task: str | Mapping[str, Any] | Task | None,
    *,
    prompts: str | Path | Rows | None,
    test_prompts: str | Path | Rows,
) -> Task | Mapping[str, Any] | None:
    """The task that was given, or one made of prompts; a task by name comes back as a table."""
    if task is not None:
        if prompts is not None or test_prompts:
            raise ValueError("task: it brings its own prompts; give a task or prompts, not both")
        return {"name": task} if isinstance(task, str) else task
    if prompts is None and not test_prompts:
        return None
    train = _prompts("train", prompts if prompts is not None else ())
    test = _prompts("test", test_prompts)
    answered = all("answer" in prompt.columns for prompt in (*train, *test))
    return PromptTask(
        name="prompts",
        rewards={"exact": 1.0} if answered else {},
        train=train,
        test=test,
        solve=_answer_of,
    )


def _prompts(split: str, rows: str | Path | Rows) -> tuple[Prompt, ...]:
    if isinstance(rows, str | Path):  # the same checks as for a file named in a recipe
        named = jsonl_task(path=rows).prompts("train")
        return tuple(replace(p, id=p.id.replace("train", split, 1)) for p in named)
    return tuple(_prompt(f"{split}-{number}", row) for number, row in enumerate(rows))


def _prompt(name: str, row: str | Mapping[str, Any]) -> Prompt:
    if isinstance(row, str):
        return Prompt(id=name, text=row)
    columns = dict(row)
    messages = columns.pop("messages", ())
    text = columns.pop("prompt", "")
    if not text and not messages:
        raise ValueError(f"prompts: row {name!r} has no 'prompt' and no 'messages': {row!r}")
    return Prompt(id=name, text=text, messages=tuple(messages), columns=columns)


def _answer_of(prompt: Prompt) -> str:
    return str(prompt.columns.get("answer", ""))


def has_test(task: Task | Mapping[str, Any] | None) -> bool:
    """Whether there are prompts to evaluate on."""
    made = make_task(dict(task)) if isinstance(task, Mapping) else task
    return made is not None and bool(made.prompts("test"))
