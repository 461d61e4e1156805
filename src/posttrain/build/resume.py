"""Going on with a run: whether it is still the same run, and where each stage stands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.build.interrupts import Stopped
from posttrain.config import Recipe, recipe_from_dict
from posttrain.disk import NotWrittenError
from posttrain.runs import RunFolder, StageFolder, config_digest, differences, read_json, write_json
from posttrain.runs.checkpoints import Checkpoint, cut_back, newest
from posttrain.runs.drift import is_within

BESIDE_RECIPE = ("supplied", "contents", "code")
"""What config.json holds beside the recipe: objects handed over, files and functions, the code."""
FREE = ("run.folder",)  # a run folder may be moved


def recorded_recipe(path: str | Path) -> Recipe:
    """The recipe of a run folder, with every default it was resolved to."""
    folder = RunFolder(path)
    if not (folder.path / "config.json").exists():
        raise ValueError(
            f"{folder.path}: was ended before it began; start it again: posttrain run RECIPE"
        )
    config = folder.config
    if "supplied" in config:
        objects = ", ".join(config["supplied"])
        raise ValueError(
            f"{folder.path}: was started from Python with objects of its own ({objects}), which a "
            "folder cannot hold; call the same function again with resume=True"
        )
    given = {name: table for name, table in config.items() if name not in BESIDE_RECIPE}
    given["run"] = {**given["run"], "folder": str(folder.path)}
    return recipe_from_dict(given)


def check_same(path: str | Path, config: Mapping[str, Any], *, allow: Sequence[str]) -> None:
    """Refuse to go on with a run under another config, but for the keys in ``allow``.

    Where those are allowed to change, what was done under the old ones still counts.
    """
    if not (Path(path) / "config.json").exists():
        return
    folder = RunFolder(path)
    if folder.finished:
        return
    old = folder.config
    changes = differences(old, config, ignore=FREE)
    refused = [change for change in changes if not is_within(_key(change), allow)]
    if refused:
        keys = " ".join(dict.fromkeys(_table(change) for change in refused))
        raise ValueError(
            f"{folder.path}: cannot go on as the same run, because this has changed:\n  "
            + "\n  ".join(refused)
            + f"\nPut it back as it was; or, to go on all the same, --allow-changes {keys}; "
            "or leave out --resume, and stages that are not finished start anew"
        )
    if changes:
        _adopt(folder, old=old, new=config)


def stage_digests(config: Mapping[str, Any], stages: Sequence[str]) -> dict[str, str]:
    """What each stage depends on, in one word: its section, its data, and the stages before it."""
    digest = config_digest(config["model"], str(config["run"]["seed"]))
    digests = {}
    for stage in stages:
        keys = (stage, "task", "rewards", "supplied", "contents")
        digest = config_digest({key: config.get(key, {}) for key in keys}, digest)
        digests[stage] = digest
    return digests


def take_up(
    folder: RunFolder, stage: str, *, digest: str, console: Console
) -> tuple[StageFolder, Checkpoint | None]:
    """The folder of a stage that was begun, taken back to its last checkpoint that is whole.

    A stage that was not begun, or under another config, gets a new folder.
    """
    if folder.begun(stage) != digest:
        made = folder.begin(stage, replace=True)
        folder.mark(stage, digest=digest)
        return made, None
    found = folder.stage(stage)
    begins_at, problems = newest(found)
    for problem in problems:
        console.print(f"checkpoint left out: {problem}", markup=False, soft_wrap=True)
    cut_back(found, begins_at)
    place = "its beginning" if begins_at is None else f"step {begins_at.step}"
    console.print(f"{stage}: goes on from {place}")
    return found, begins_at


def how_to_continue(folder: RunFolder) -> str:
    """What to call to go on with a run."""
    if "supplied" in folder.config:
        return "call the same function again with resume=True"
    return f"posttrain resume {folder.path}"


@contextlib.contextmanager
def told(folder: RunFolder, console: Console) -> Iterator[None]:
    """Say how a run that ends early can go on."""
    further = how_to_continue(folder)
    try:
        yield
    except KeyboardInterrupt as stop:
        step = stop.saved if isinstance(stop, Stopped) else None
        what = "stopped" if step is None else f"stopped after step {step}, which is saved"
        console.print(f"{what}; to go on: {further}", markup=False, soft_wrap=True)
        raise
    except NotWrittenError as error:
        error.then = further
        raise


def _adopt(folder: RunFolder, *, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Let what was begun or done under the old config count under the new one."""
    before = stage_digests(old, old["run"]["stages"])
    for stage, digest in stage_digests(new, new["run"]["stages"]).items():
        known = before.get(stage)
        for name in ("begun.json", "done.json"):
            path = folder.stage(stage).path / name
            if path.exists() and (record := read_json(path))["digest"] == known:
                write_json(path, {**record, "digest": digest})


def _key(change: str) -> str:
    return change.partition(": ")[0]


def _table(change: str) -> str:
    """What to allow: the key, or for digests, which come several at once, their table."""
    key = _key(change)
    table = key.partition(".")[0]
    return table if table in BESIDE_RECIPE else key
