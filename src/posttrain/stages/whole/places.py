"""Where a run that was started from Python goes: a numbered folder, or one that is made anew."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.build.model_source import folder_name
from posttrain.runs import RunFolder
from posttrain.runs.before import BEFORE, forget_before, in_doubt, is_ours, keep_before, put_back
from posttrain.runs.lock import FILE_NAME, held

ROOT = Path("runs")


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


def undo_killed(folder: str | Path, *, resume: bool) -> None:
    """Undo a start in a folder that was killed before its first step.

    To ``resume`` is to go on with it instead, unless it was to take the place of an older run.
    """
    if in_doubt(path := Path(folder)):
        with held(path):
            _undo(path, resume=resume)


def _undo(path: Path, *, resume: bool) -> None:
    if resume:
        with contextlib.suppress(OSError):  # it holds an older run
            (path / BEFORE).rmdir()
    put_back(path)


@contextlib.contextmanager
def undone(folder: str, *, made: bool, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Inside, a run is started: if that raises before its first step, its folder is as it was.

    One that was ``made`` for this run goes. All this is done by whoever holds the folder.
    """
    path = Path(folder)
    _undo(path, resume=resume)
    try:
        if overwrite or not (path / "run.json").exists():
            keep_before(path)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # of two errors the first one is to be heard
            put_back(path)
            if [entry.name for entry in path.iterdir()] == [FILE_NAME]:
                (path / FILE_NAME).unlink()
                if made:
                    path.rmdir()
        raise
    forget_before(path)


def check_replaced(folder: str, *, used: Mapping[str, Any] | None = None) -> None:
    """Refuse to put a new run in the place of anything but a run of ours.

    Or of one that holds what is to be ``used``, by the settings of a recipe, for the new run.
    """
    path = Path(folder)
    if path.is_symlink():
        raise ValueError(f"overwrite: {path} is a link; name the folder that it points to")
    names = {entry.name for entry in path.iterdir()} - {FILE_NAME} if path.is_dir() else set()
    if not path.exists() or (path.is_dir() and not names):
        return
    RunFolder(path)
    others = sorted(name for name in names - {".DS_Store"} if not is_ours(name))
    if others:
        raise ValueError(
            f"overwrite: {path} holds files that no run wrote ({', '.join(others[:4])}), and "
            "is not replaced; move them elsewhere, or choose another folder"
        )
    if inside := _inside(path.resolve(), [str(Path.cwd()), used or {}]):
        raise ValueError(
            f"overwrite: {path} holds what the new run needs ({inside}), and is not replaced; "
            "choose another folder"
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
