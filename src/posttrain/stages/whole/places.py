"""Where a run that was started from Python goes: a numbered folder, or one that is made anew."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.build.model_source import folder_name
from posttrain.runs import RunFolder
from posttrain.runs.keeper import BEFORE, forget_before
from posttrain.runs.lock import FILE_NAME

ROOT = Path("runs")
_MOVING = (
    ".moving.tmp"  # holds a part of what the folder held before: nothing of the new run is there
)
# All that a run writes into its folder: see posttrain.runs.folder.
_OURS = re.compile(
    r"\.lock|\..*\.tmp|\.(base|start)-.*|\.DS_Store|(run|config|places|threads|summary|samples|changes)\.json|recipe\.toml|curves\.png"
    r"|(sft|prefer|reward|dpo|rl|eval)(\.old-\d+)?|adapters|(base|start|vllm)-\w+"
    r"|report\.html|report-\w+-metrics\.csv"
)


@contextlib.contextmanager
def run_place(folder: object, stage: str, *, resume: bool, overwrite: bool) -> Iterator[str]:
    """The folder of a run: the one that is named, else ``runs/STAGE-N`` with the next number.

    To go on without a name is to go on with the newest. A folder that was made here, and is empty
    when what is inside raises, is gone again.
    """
    if overwrite and resume:
        raise ValueError("overwrite: a run is resumed or overwritten, not both; drop one of them")
    if folder is not None:
        yield folder_name(folder, example=str(ROOT / f"{stage}-1"))
        return
    if overwrite:
        raise ValueError(
            "overwrite: which folder? Without a name every run gets a new one; name it, "
            f"folder={str(ROOT / f'{stage}-1')!r}, or drop overwrite"
        )
    known = _numbers(stage)
    if resume and known:
        yield str(ROOT / f"{stage}-{known[-1]}")
        return
    path = _claim(stage)
    try:
        yield str(path)
    except BaseException:
        with contextlib.suppress(OSError):  # it holds a run
            path.rmdir()
        raise


def _numbers(stage: str) -> list[int]:
    names = [entry.name for entry in ROOT.iterdir()] if ROOT.is_dir() else []
    found = (re.fullmatch(rf"{stage}-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _claim(stage: str) -> Path:
    """A new folder with the next number; of two processes that ask at once, each gets its own."""
    ROOT.mkdir(exist_ok=True)
    while True:
        path = ROOT / f"{stage}-{max(_numbers(stage), default=0) + 1}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


@contextlib.contextmanager
def undone(folder: str, *, made: bool, overwrite: bool) -> Iterator[None]:
    """Inside, a run is started: if that raises before its first step, its folder is as it was.

    Till then what the folder held is kept in it, or an empty folder says that it held nothing. A
    start that was killed is undone by the next; one that was ``made`` for this run goes.
    """
    path = Path(folder)
    _put_back(path)
    if overwrite or not (path / "run.json").exists():
        _move(path, path / _MOVING)
        os.replace(path / _MOVING, path / BEFORE)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # of two errors the first one is to be heard
            _put_back(path)
            if [entry.name for entry in path.iterdir()] == [FILE_NAME]:
                (path / FILE_NAME).unlink()
                if made:
                    path.rmdir()
        raise
    forget_before(path)


def _put_back(path: Path) -> None:
    """Let a folder hold what it held before the start; a kill at any point loses none of that."""
    if (path / BEFORE).exists():
        for entry in path.iterdir():
            if entry.is_dir() and entry.name != BEFORE:
                shutil.rmtree(entry)
            elif entry.name not in (FILE_NAME, BEFORE):
                entry.unlink()
        os.replace(path / BEFORE, path / _MOVING)
    if (path / _MOVING).exists():
        _move(path / _MOVING, path)
        (path / _MOVING).rmdir()


def _move(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for entry in list(source.iterdir()):
        if entry.name not in (FILE_NAME, _MOVING):
            os.replace(entry, target / entry.name)


def check_replaced(folder: str, *, used: Mapping[str, Any] | None = None) -> None:
    """Refuse to put a new run in the place of anything but a run of ours.

    Or of one that holds what is to be ``used``, by the settings of a recipe, for the new run.
    """
    path = Path(folder)
    if path.is_symlink():
        raise ValueError(f"overwrite: {path} is a link; name the folder that it leads to")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    RunFolder(path)
    others = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    if others:
        raise ValueError(
            f"overwrite: {path} holds what no run has written ({', '.join(others[:4])}), and is "
            "left as it is; move that elsewhere, or choose another folder"
        )
    if inside := _inside(path.resolve(), [str(Path.cwd()), used or {}]):
        raise ValueError(
            f"overwrite: {path} would go with what the new run needs of it ({inside}), and is left "
            "as it is; choose another folder"
        )


def _inside(folder: Path, given: object) -> str:
    """The first of the texts in settings that names something within a folder; "" for none."""
    if isinstance(given, Mapping):
        return next(filter(None, (_inside(folder, each) for each in given.values())), "")
    if isinstance(given, list | tuple):
        return next(filter(None, (_inside(folder, each) for each in given)), "")
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a text that is no path
        if isinstance(given, str) and given and Path(given).expanduser().exists():
            found = Path(given).expanduser().resolve()
            return given if found.is_relative_to(folder) else ""
    return ""
