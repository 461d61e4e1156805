"""Several adapters in one run (``rl.adapters``, ``[[sweep]]``): the recipe of each, as if alone."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from posttrain.config import ConfigError, Recipe, Resolved, recipe_from_dict, resolve
from posttrain.config.recipe_rules import row_keys
from posttrain.config.toml import value_text

FOLDER = "adapters"


def members(recipe: Resolved, *, supplied: Collection[str] = ()) -> list[Resolved]:
    """The recipe of each adapter, resolved: every row of the sweep with ``rl.adapters`` seeds."""
    if "engine" in supplied:
        raise ValueError("engine: adapters are sampled together by the engine native; give none")
    base = recipe.written.model_dump(exclude_unset=True)
    base.pop("sweep", None)
    base.setdefault("rl", {}).pop("adapters", None)
    found: list[Resolved] = []
    for row in recipe.sweep or ({},):
        for more in range(recipe.rl.adapters):
            values = _over(copy.deepcopy(base), row)
            run = values.setdefault("run", {})
            run["seed"] = _later(run.get("seed", 0), more)
            run["folder"] = f"{recipe.run.folder}/{FOLDER}/{len(found)}"
            found.append(_resolved(values, row, source=recipe.source, supplied=supplied))
    return found


def _later(seed: Any, more: int) -> Any:
    return seed + more if isinstance(seed, int) else seed  # what is none is refused with its key


def _resolved(
    values: dict[str, Any], row: Mapping[str, Any], *, source: str, supplied: Collection[str]
) -> Resolved:
    try:
        return resolve(recipe_from_dict(values, source=source), supplied=supplied)
    except ConfigError as error:
        told = f" (row {value_text(row)} of sweep)" if row else ""
        problems = [f"{problem}{told}" for problem in error.problems]
        raise ConfigError(problems, source=source) from None


def varied(recipe: Recipe) -> list[str]:
    """The keys in which the adapters of a recipe differ, as its rows name them."""
    return list(dict.fromkeys(key for row in recipe.sweep for key in row_keys(row)))


def _over(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with changes put over them; a table that names a piece takes the place of one."""
    for name, new in changes.items():
        old = values.get(name)
        inner = isinstance(old, dict) and isinstance(new, Mapping) and "name" not in new
        values[name] = _over(old, new) if inner and isinstance(old, dict) else new
    return values
