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
    for name in recipe.rewards:
        if ":" in name:
            known[f"rewards.{name}"] = config_digest(
                function_text(look_up(name, {}, kind="rewards"))
            )
    named = {f"task.{key}": value for key, value in (recipe.task or {}).items()}
    if recipe.sft is not None and "sft" in recipe.stages:
        named["sft.data"] = recipe.sft.data
    for key, value in named.items():
        if isinstance(value, str) and Path(value).is_file():
            known[key] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return {"contents": known} if known else {}
