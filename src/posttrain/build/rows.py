"""Prompts handed over from Python, as a task."""

from __future__ import annotations

import json
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.protocols import Split, Task
from posttrain.tasks import PromptTask, make_task
from posttrain.tasks.prompt_file import (
    Columns,
    answer_check,
    check_rows,
    default_rewards,
    gold_answer,
    name_prompts,
    read_prompts,
)
from posttrain.types import Prompt

Rows = Sequence[str | Mapping[str, Any]]


def rows_task(
    task: str | Mapping[str, Any] | Task | None,
    *,
    prompts: str | Path | Rows | None,
    test_prompts: str | Path | Rows,
) -> Task | Mapping[str, Any] | None:
    """The task that was given, or one made of prompts; a task by name comes back as a table."""
    # Those of ``posttrain.evaluate`` are a test, and it calls them prompts.
    test_name = "prompts" if prompts is None else "test_prompts"
    train_rows = None if prompts is None else _listed(prompts, name="prompts")
    test_rows = _listed(test_prompts, name=test_name)
    if task is not None:
        if train_rows is not None or test_rows:
            raise ValueError("task: it brings its own prompts; give a task or prompts, not both")
        return {"name": task} if isinstance(task, str) else task
    if train_rows is None and not test_rows:
        return None
    train = () if train_rows is None else _prompts("train", train_rows, name="prompts")
    test = _prompts("test", test_rows, name=test_name)
    check = answer_check((*train, *test))
    return PromptTask(
        name="prompts",
        rewards=default_rewards(check),
        train=train,
        test=test,
        solve=gold_answer,
        accuracy=check,
    )


def _listed(rows: Any, *, name: str) -> str | Path | list[Any]:
    """A path as it is, rows as a list; no table by column, which would yield its column names."""
    if isinstance(rows, str | Path):
        return rows
    if isinstance(rows, Mapping) or hasattr(rows, "columns") or not isinstance(rows, Iterable):
        raise ValueError(
            f"{name}: expected a list of rows, got {type(rows).__name__}; of a DataFrame: "
            'df.to_dict("records")'
        )
    return list(rows)


def _prompts(split: Split, rows: str | Path | list[Any], *, name: str) -> tuple[Prompt, ...]:
    if isinstance(rows, str | Path):
        return name_prompts(split, read_prompts(rows, Columns()))
    as_read = [(number, _row(row, where=f"{name}[{number}]")) for number, row in enumerate(rows)]
    return name_prompts(split, check_rows(as_read, Columns(), name=name, at="[{}]".format))


def _row(row: Any, *, where: str) -> dict[str, Any]:
    """A row as if read from a file: what the checks of files look at is JSON, the rest as given."""
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, Mapping):
        raise ValueError(
            f'{where}: expected text or a dict like {{"prompt": …}}, got {type(row).__name__}'
        )
    read = dict(row)
    for column in [name for name in ("prompt", "messages", "answer") if name in read]:
        try:  # operator.index: the whole numbers of numpy
            text = json.dumps(read[column], allow_nan=False, default=operator.index)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: {column!r} is nothing that JSON can hold: {reprlib.repr(read[column])}; "
                "turn it into text"
            ) from error
        read[column] = json.loads(text)
    return read


def has_test(task: Task | Mapping[str, Any] | None) -> bool:
    """Whether there are prompts to evaluate on."""
    made = make_task(dict(task)) if isinstance(task, Mapping) else task
    return made is not None and bool(made.prompts("test"))
