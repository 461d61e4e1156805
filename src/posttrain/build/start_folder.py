"""From where a run was started: relative paths and modules of its recipe are found there again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from posttrain.config import Recipe
from posttrain.config.paths import import_from, relative_paths
from posttrain.runs import RunFolder, read_json, write_json

FILE_NAME = "places.json"


def note_places(folder: RunFolder, recipe: Recipe) -> None:
    """Write down the current folder, and the recipe's; a run that goes on knows its recipe's."""
    beside = str(Path(recipe.source).resolve().parent) if recipe.source else _known(folder)[1]
    write_json(folder.path / FILE_NAME, {"folder": str(Path.cwd()), "recipe": beside})


def go_back(folder: RunFolder) -> str:
    """Go to the folder where a run was started, and say so; empty where that is here.

    What its recipe names is then the same to the letter, digests and all.
    """
    here = Path.cwd()
    started, beside = _known(folder)
    if not started or Path(started).resolve() == here.resolve():
        import_from(*(Path(place) for place in (beside,) if place))
        return ""
    if not Path(started).is_dir():
        return f"was started in {started}, which is not here: its files are looked for in {here}"
    os.chdir(started)
    import_from(*(Path(place) for place in (started, beside) if place), before=here)
    return f"goes on in {started}, where it was started"


def as_recorded(values: dict[str, Any], folder: RunFolder) -> None:
    """Let relative paths of a run's config mean what they meant to the run, seen from anywhere."""
    started, beside = _known(folder)
    import_from(*(Path(place) for place in (started, beside) if place), before=Path.cwd())
    for table, key, _ in relative_paths(values):
        if started and (Path(started) / table[key]).exists():
            table[key] = str(Path(started) / table[key])


def _known(folder: RunFolder) -> tuple[str, str]:
    """Where a run was started and where its recipe stood; empty where it does not say."""
    path = folder.path / FILE_NAME
    known = read_json(path) if path.exists() else {}
    return str(known.get("folder", "")), str(known.get("recipe", ""))
