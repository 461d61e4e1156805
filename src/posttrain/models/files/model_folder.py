"""Model folders: what one must hold to be read safely, and how one is written whole."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from posttrain.disk import sync, writing
from posttrain.model_paths import check_names
from posttrain.models.files.damaged import check_files


def check_folder(folder: Path, *, kind: str = "model") -> None:
    """Raise where a folder holds no model, or one that could only be read by running code."""
    check_names(folder, kind=kind)
    check_files(folder, kind=kind)


@contextlib.contextmanager
def replacing_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write into, moved to ``folder`` at the end: one that exists is complete.

    An older model there is replaced; anything else is left alone, with an error.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    with writing(folder), _scratch(folder) as scratch:
        new, old = scratch / "new", scratch / "old"
        yield new
        for entry in [*new.rglob("*"), new]:
            sync(entry)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # of two errors the first one is to be heard


def _check_replaceable(folder: Path) -> None:
    known = ("config.json", "adapter_config.json")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if any((folder / name).is_file() for name in known):
        return
    if folder.exists():
        raise ValueError(
            f"save: {str(folder)!r} exists and is not a model folder, so it is not replaced; "
            "choose another name, or remove it"
        )
