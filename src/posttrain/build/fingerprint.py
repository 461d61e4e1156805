"""What a run depends on beyond its recipe's words: the text of reward functions, the rows of files.

The run folder remembers a digest of each, so that an edited reward or data file is another run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

from posttrain.config import Recipe
from posttrain.registry import look_up
from posttrain.runs import config_digest

_FILES = ("data", "test_data")


def function_text(function: Any) -> str:
    """The text of a function with its bound options, or its name where Python has no text."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options |= function.keywords
        function = function.func
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = str(getattr(function, "__qualname__", type(function)))
    return f"{text}{options}"


def fingerprints(recipe: Recipe) -> dict[str, Any]:
    """Digests of the functions and files that a recipe names; empty where it names none."""
    known: dict[str, str] = {}
    tables = {"rewards": recipe.rewards}
    if recipe.prefer is not None and "prefer" in recipe.stages:
        tables["prefer.rewards"] = recipe.prefer.rewards
    named = {f"task.{key}": value for key, value in (recipe.task or {}).items()}
    for key, table in tables.items():
        for name, given in table.items():
            if ":" in name:
                text = function_text(look_up(name, {}, kind="rewards"))
                known[f"{key}.{name}"] = config_digest(text)
            named[f"{key}.{name}.path"] = given.get("path")
    for stage, section in (("sft", recipe.sft), ("reward", recipe.reward)):
        if section is not None and stage in recipe.stages:
            named |= {f"{stage}.{key}": getattr(section, key, None) for key in _FILES}
    if recipe.rl is not None and recipe.rl.critic is not None:
        named["rl.critic.source"] = recipe.rl.critic.source
    for key, value in named.items():
        file = _file(value)
        if file is not None:
            known[key] = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"contents": known} if known else {}


def _file(value: Any) -> Path | None:
    """What to digest of a path: the file, or the weights' own list of a model folder."""
    if not isinstance(value, str):
        return None
    path = Path(value)
    inside = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    return path if path.is_file() else inside[0] if inside else None
