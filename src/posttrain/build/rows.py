"""Rows handed over from Python: prompts as a task, demonstrations and preferences as a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from posttrain.build.fingerprint import function_digest
from posttrain.build.preference_rows import PAIRS, TEST_PAIRS
from posttrain.config import Resolved
from posttrain.config.paths import WORDS
from posttrain.config.preference_rules import READ_AS
from posttrain.data.conventions import check_columns, understood
from posttrain.data.row_objects import hand_over, is_columnar, row_list
from posttrain.envs.shapes import hand_over as hand_over_env
from posttrain.protocols import Env, Task
from posttrain.rewards import REWARDS
from posttrain.tasks import PromptTask, check_told_apart, make_task
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
    if isinstance(data, str | PathLike):
        return os.fspath(data)
    return hand_over(data, name=name)


def preference_data(data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Preferences beside a stage's options: a run stands for those it has made, test ones too."""
    made = Path(data) / "prefer" if isinstance(data, str | PathLike) else None
    if made is None or not (made / PAIRS).is_file():
        return {"data": data_name(data), **given}
    held_out = given.get("test_share") is None and (made / TEST_PAIRS).is_file()
    test = {"test_data": str(made / TEST_PAIRS)} if held_out else {}
    return {"data": str(made / PAIRS), **test, **given}


def env_spec(env: str | Mapping[str, Any] | Env | Callable[..., Any] | None) -> Any:
    """What a recipe calls an environment: its name or table, or a name for an object.

    A class or a function of a module is named so; what only this process has is handed over.

    >>> env_spec("calculator"), env_spec({"name": "guess_number", "high": 9})["high"]
    ('calculator', 9)
    """
    if isinstance(env, Mapping) and not isinstance(env.get("name", ""), str):
        return {**env, "name": env_spec(env["name"])}
    if env is None or isinstance(env, str | Mapping):
        return env
    if not callable(env) and not hasattr(env, "reply"):
        raise ValueError(
            f"env: expected an environment, its name, or its class or function, got {env!r}"
        )
    name = getattr(env, "__name__", type(env).__name__)
    return module_name(env) or hand_over_env(env, name=f"{name} {function_digest(env)}")


def module_name(given: Any) -> str:
    """What a recipe calls a class or a function of a module; "" for what only this process has.

    >>> module_name(module_name), module_name(lambda completion: 1.0)
    ('posttrain.build.rows:module_name', '')
    """
    module, name = getattr(given, "__module__", ""), getattr(given, "__name__", "")
    found = getattr(sys.modules.get(module), name, None) if module != "__main__" else None
    return f"{module}:{name}" if found is given else ""


def named_rewards(table: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The rewards as a recipe names them, functions of modules too, if it can name each of them."""
    ours = {function: name for name, function in REWARDS.items()}
    names = [key if isinstance(key, str) else ours.get(key) or module_name(key) for key in table]
    named = dict(zip(names, table.values(), strict=True))
    plain = "" not in named and len(named) == len(table)
    with contextlib.suppress(TypeError, ValueError):
        return named if plain and json.loads(json.dumps(named)) == named else table
    return table  # an option is an object, which no recipe can write


def rows_task(
    task: str | Mapping[str, Any] | Task | None,
    *,
    prompts: str | Path | Rows | None,
    test_prompts: str | Path | Rows,
    columns: Mapping[str, str] | None = None,
    env: Any = None,
) -> Task | Mapping[str, Any] | None:
    """The task that was given, or one made of prompts; what a recipe can name comes as a table.

    So do prompts of a file, of a folder or of the hub, if the test prompts are too. ``columns`` is
    their map; ``env`` the spec of an environment that plays them: it stands in the table.
    """
    # Those of ``posttrain.evaluate`` are a test, and it calls them prompts.
    test_name = "prompts" if prompts is None else "test_prompts"
    train_rows, test_rows = _kept(prompts, name="prompts"), _kept(test_prompts, name=test_name)
    if task is not None and (prompts is not None or test_rows):
        known = isinstance(task, Mapping) and "env" in task
        raise ValueError(
            "task: it brings its own prompts; give a task or prompts, not both"
            + "; the environment of prompts is env=…" * known
        )
    if columns and prompts is None and not test_rows:
        raise ValueError(
            'columns: of which prompts? Give prompts=…, or task={"name": "file", "columns": …, …}'
        )
    columns = check_columns("prompts", columns)
    if isinstance(train_rows, str | Path) and (not test_rows or isinstance(test_rows, str | Path)):
        named = {"path": str(train_rows), "test_path": str(test_rows or ""), "columns": columns}
        task = {"name": "file", **{key: value for key, value in named.items() if value}}
    if task is not None:
        table: Any = {"name": task} if isinstance(task, str) else task
        if env is None or not isinstance(table, Mapping):
            return table
        if table.get("env") is not None:
            raise ValueError("env: the task names one already, task.env; drop one of them")
        return {**table, "env": env}
    if prompts is None and not test_rows:
        return None
    none: tuple[dict[int, Prompt], str] = ({}, "")
    train, alike = read_prompts(train_rows, columns=columns) if prompts is not None else none
    test, also = read_prompts(test_rows, columns=columns, name=test_name) if test_rows else none
    check = answer_check((*train.values(), *test.values()))
    shown = (train_rows, "prompts") if train else (test_rows, test_name)
    made = PromptTask(
        name="prompts",
        told=understood("prompts", shown[0], columns=columns, name=shown[1]),
        rewards=default_rewards(check),
        train=name_prompts("train", train),
        test=name_prompts("test", test),
        solve=gold_answer,
        accuracy=check,
        alike=alike or also,
    )
    if env is None:
        check_told_apart(made)
    return made


def _kept(rows: Any, *, name: str) -> Any:
    """A path or a ``Dataset`` as it is; other rows as a list, for they are read twice."""
    if isinstance(rows, str | Path) or hasattr(rows, "column_names"):
        return rows
    if rows is None:
        return []
    found = row_list(rows, name=name)
    return found if is_columnar(found) else list(found)


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
