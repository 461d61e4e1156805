"""What a run depends on beyond its recipe's words: the text of reward functions, the rows of files.

The run folder remembers a digest of each, so that an edited reward or data file is another run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.config import Recipe
from posttrain.registry import look_up
from posttrain.runs import config_digest

_FILES = ("data", "test_data", "backbone")
_WORDS = ("tiny", "task", "prefer", "policy", "reward")  # these name no file
_WHOLE = 256 * 2**20  # bytes up to which a file is read in full


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
    """Digests of the functions, files and model folders that a recipe names; empty without any."""
    known: dict[str, str] = {}
    tables = {"rewards": recipe.rewards}
    if recipe.prefer is not None and "prefer" in recipe.stages:
        tables["prefer.rewards"] = recipe.prefer.rewards
    named = {f"task.{key}": value for key, value in (recipe.task or {}).items()}
    named["model.name"] = recipe.model.name
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
        found = _contents(value)
        if found is not None:
            known[key] = found
    return {"contents": known} if known else {}


def code_version() -> dict[str, str]:
    """What the numbers of a run come from beside its recipe: this code, and what computes."""
    package = Path(__file__).parents[1]
    texts = [(str(path.relative_to(package)), path) for path in package.rglob("*.py")]
    source = config_digest(*(f"{name} {_digest(path)}" for name, path in sorted(texts)))
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"posttrain": __version__, "source": source[:16], **versions}


def _contents(value: Any) -> str | None:
    """The digest of a file, or of a model folder; None for what is neither, or means a stage."""
    if not isinstance(value, str) or value in _WORDS:
        return None
    path = Path(value)
    if path.is_file():
        return _digest(path)
    if not (path / "config.json").is_file():
        return None
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    return config_digest(*(_digest(file) for file in files))


def _digest(file: Path) -> str:
    """Of a file's bytes; of a large one's size, beginning and end: reading it all takes minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if size <= _WHOLE:
            digest.update(opened.read())
        else:
            digest.update(opened.read(_WHOLE // 2))
            opened.seek(-_WHOLE // 2, 2)
            digest.update(opened.read())
    return digest.hexdigest()
