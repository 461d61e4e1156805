"""Finds the files and modules that a recipe names: in the current folder, or in the recipe's.

A relative path, or the module of a ``"module:function"``, is looked for in the current folder
first, then beside the recipe. A path on the command line is always seen from the current folder.
"""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.model_paths import check_source

_NAMED = (
    ("model", "name"),
    ("sft", "data"),
    ("sft", "test_data"),
    ("reward", "data"),
    ("reward", "test_data"),
    ("reward", "backbone"),
    ("dpo", "data"),
    ("dpo", "test_data"),
    ("rl", "critic", "source"),
    ("teacher", "model"),
)
# Keys of [rl] that may name a function of a module.
PIECES = ("advantage", "loss", "weights", "correction", "engine")
_MODEL = "model"  # the reward that is a reward model
WORDS = ("tiny", "task", "prefer", "policy", "reward")  # values of path keys that name no file


def beside_recipe(values: dict[str, Any], folder: Path) -> list[str]:
    """Make files and modules that are only in the recipe's ``folder`` found; returns notes.

    Paths in ``values`` are changed in place; modules become importable from the folder.
    """
    here, notes = Path.cwd(), []
    if folder.resolve() == here.resolve():
        return []
    for table, key, name in relative_paths(values):
        mine, theirs = here / table[key], folder / table[key]
        if theirs.exists() and not mine.exists():
            table[key] = str(theirs)
        elif theirs.exists() and not _same(mine, theirs):
            notes.append(_twice(f"{name} {table[key]!r}", theirs))
    modules = own_modules(values)
    for module in modules:
        mine, theirs = _module_file(here, module), _module_file(folder, module)
        if mine is not None and theirs is not None and not _same(mine, theirs):
            notes.append(_twice(f"module {module!r}", theirs))
    if modules:
        import_from(here, folder)
    return notes


def model_paths(recipe: Any) -> dict[str, str]:
    """The models that the stages of a recipe begin with, by the keys that name them."""
    named = {"model": recipe.model.name, "rewards.model": recipe.rewards.get(_MODEL)}
    if "prefer" in recipe.stages:
        named["prefer.rewards.model"] = recipe.prefer.rewards.get(_MODEL)
    if "reward" in recipe.stages:
        named["reward.backbone"] = recipe.reward.backbone
    if "rl" in recipe.stages and recipe.rl.critic is not None:
        named["rl.critic.source"] = recipe.rl.critic.source
    if "rl" in recipe.stages and recipe.teacher is not None:
        named["teacher.model"] = recipe.teacher.model
    paths = {
        key: each.get("path") if isinstance(each, Mapping) else each for key, each in named.items()
    }
    return {key: path for key, path in paths.items() if isinstance(path, str)}


def check_model_paths(recipe: Any, *, anew: bool = False, written: bool = False) -> None:
    """Raise where a new run would begin with a model that is not there, or is none.

    ``anew`` is for one that takes the place of another, ``written`` for one whose model is an
    object, which is written into its folder later.
    """
    if not anew and (Path(recipe.run.folder) / "run.json").exists():
        return  # of a run that goes on, a base may be gone that it needs no more
    for key, path in model_paths(recipe).items():
        if path not in (*WORDS, "") and not (written and key == "model"):
            check_source(path, kind=key)


def check_given(model: str) -> None:
    """Raise for what is neither a recipe, nor a run, nor a model, before torch is loaded."""
    path = Path(model).expanduser()
    if path.suffix != ".toml" and not (path / "run.json").is_file():
        check_source(model)


def import_from(*folders: Path, before: Path | None = None) -> None:
    """Append folders to ``sys.path``, or insert them before one that is there."""
    for folder in map(str, folders):
        if folder in sys.path and before is None:
            continue
        found = before is not None and str(before) in sys.path
        sys.path.insert(sys.path.index(str(before)) if found else len(sys.path), folder)


def relative_paths(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Every relative path in a recipe: the table that holds it, its key, and its full name."""
    for name in _NAMED:
        table = _table(values, *name[:-1])
        if _is_relative(table.get(name[-1])):
            yield table, name[-1], ".".join(name)
    holders = {"task": _table(values, "task")}
    for number, each in enumerate(_listed(holders["task"], "tasks"), start=1):
        holders[f"task.tasks[{number}]"] = each
    for home in (("rewards",), ("prefer", "rewards")):
        holders |= {".".join((*home, key)): table for key, table in _table(values, *home).items()}
    for where, table in holders.items():
        if isinstance(table, dict):
            paths = [key for key in table if key == "path" or key.endswith("_path")]
            yield from ((table, k, f"{where}.{k}") for k in paths if _is_relative(table[k]))
    for number, row in enumerate(_listed(values, "sweep")):
        found = relative_paths(row) if isinstance(row, Mapping) else ()
        yield from ((table, key, f"sweep[{number}].{name}") for table, key, name in found)


def own_modules(values: Mapping[str, Any]) -> list[str]:
    """The modules of every ``"module:function"`` in a recipe."""
    names = [_name(values.get("task")), _name(_table(values, "task").get("env"))]
    names += _table(values, "rewards")
    names += map(_name, _listed(_table(values, "run"), "trackers"))
    names += map(_name, _listed(_table(values, "task"), "tasks"))
    names += _table(values, "prefer", "rewards")
    names += [_name(_table(values, "rl").get(piece)) for piece in PIECES]
    names.append(_name(_table(values, "rl", "critic").get("loss")))
    modules = [name.partition(":")[0] for name in names if ":" in name]
    for row in _listed(values, "sweep"):
        modules += own_modules(row) if isinstance(row, Mapping) else []
    return list(dict.fromkeys(module for module in modules if module != "reasoning_gym"))


def _table(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A table inside the values of an unchecked recipe; empty where there is none."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def _listed(table: Mapping[str, Any], name: str) -> list[Any]:
    """A list inside a table of an unchecked recipe; empty where there is none."""
    found = table.get(name)
    return found if isinstance(found, list) else []


def _name(piece: Any) -> str:
    name = piece.get("name") if isinstance(piece, Mapping) else piece
    return name if isinstance(name, str) else ""


def _is_relative(value: Any) -> bool:
    named = isinstance(value, str) and value not in (*WORDS, "") and "\0" not in value
    return named and not Path(value).is_absolute() and not value.startswith("~")


def _module_file(folder: Path, module: str) -> Path | None:
    place = folder.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _same(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _twice(what: str, theirs: Path) -> str:
    return (
        f"{what}: the one in the current folder is taken, and a different one is beside the recipe "
        f"({theirs}); rename one"
    )
