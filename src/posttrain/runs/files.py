"""Whole files and folders that are either there or not: written beside, synced, renamed.

A crash at any moment leaves the old content or the new one, never a half; what it may leave behind
is a hidden ``.NAME.PID.tmp``, which nothing reads. A disk that is full or may not be written gives
an error with the path and what to do (:mod:`posttrain.disk`), and leaves no such file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.disk import NotWrittenError, sync, writing
from posttrain.runs.drift import config_digest
from posttrain.track.encoding import encode_json

SEAL = "sha256"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a new version of the file ``path``; it takes effect when the block ends."""
    _check_replaceable(path)
    beside = _beside(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
            sync(beside)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to hear of
                beside.unlink()
            raise
        sync(path.parent)


def check_writable(path: Path) -> None:
    """Raise now what :func:`replacing` would raise later."""
    _check_replaceable(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _beside(path).touch()
        _beside(path).unlink()


def _check_replaceable(path: Path) -> None:
    """Raise where what is there is no file: one would take its place, be it that of /dev/null."""
    if os.path.exists(path) and not os.path.isfile(path):  # not there: a name that is too long, too
        raise NotWrittenError(errno.EISDIR if os.path.isdir(path) else errno.ENXIO, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A place to fill the folder ``path``, a model or a checkpoint; it appears when the block ends.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> with new_folder(root / "model") as folder:
    ...     size = (folder / "config.json").write_text("{}")
    ...     (root / "model").exists()
    False
    >>> (root / "model" / "config.json").read_text()
    '{}'
    """
    if path.exists():
        raise FileExistsError(f"{path}: already exists; remove it first, or choose another name")
    beside = _beside(path)
    shutil.rmtree(beside, ignore_errors=True)  # a process that had this number and was killed
    with writing(path):
        beside.mkdir(parents=True)
        try:
            yield beside
            for entry in [*beside.rglob("*"), beside]:
                sync(entry)
            os.replace(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, in UTF-8."""
    with replacing(path) as beside:
        beside.write_bytes(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file; ``posttrain.track.encoding`` says how NaN and infinity look."""
    with replacing(path) as beside:
        beside.write_bytes(encode_json(value, indent=2) + b"\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or say which one is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); restore it, or delete it") from error


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON file that holds a table with these keys, or say which one does not."""
    found = read_json(path)
    if not isinstance(found, dict) or not found.keys() >= {*keys}:
        raise ValueError(f"{path}: is not as posttrain has written it; restore it, or delete it")
    return found


def write_sealed(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file with the hash of its own content."""
    plain = {name: value for name, value in record.items() if name != SEAL}
    write_json(path, {**plain, SEAL: config_digest(plain)})


def read_sealed(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON file that vouches for itself, unless it is of a version that wrote no hashes."""
    record = read_record(path, *keys)
    if SEAL in record or {"inputs", "manifest"} & record.keys():
        check_seal(record, path)
    return record


def check_seal(record: Mapping[str, Any], path: Path) -> None:
    """Raise where what :func:`write_sealed` wrote to ``path`` has changed since."""
    plain = {name: value for name, value in record.items() if name != SEAL}
    if record.get(SEAL) != config_digest(plain):
        raise ValueError(
            f"{path}: has changed since it was written; put it back as it was, or remove "
            "it: what it stands for is then done over"
        )


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
