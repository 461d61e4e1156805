"""Errors of writing that a user can act on: which path, what is wrong, what to do."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_kept: dict[Path, int] = {}  # folders that must not be moved, and an open descriptor of each

_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("the file is larger than allowed (ulimit -f)", "raise the limit"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or choose another folder"),
    errno.EACCES: ("permission is missing", "change the permissions, or choose another folder"),
    errno.EPERM: ("permission is missing", "change the permissions, or choose another folder"),
    errno.EIO: ("the disk reports an error", "look at the system's log, or choose another disk"),
    errno.ENAMETOOLONG: ("its name is too long", "choose a shorter one"),
    errno.EISDIR: ("it is a folder", "name a file"),
    errno.ENXIO: ("it is a device or a pipe", "name a file"),
    errno.ENOTDIR: ("a part of its path is a file", "choose another folder"),
    errno.EEXIST: ("a part of its path is a file", "choose another folder"),
    errno.ENOENT: ("its folder cannot be made", "choose another folder"),
}
_OF_SOME_PATH = (errno.EISDIR, errno.ENXIO, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
# Libraries in Rust (safetensors, tokenizers) raise no OSError, but their text has the errno.
_NUMBER = re.compile(r"\(os error (\d+)\)")


class NotWrittenError(OSError):
    """A file could not be written; the message says why, what to do, and how to resume ``then``."""

    def __init__(
        self, number: int, path: str | os.PathLike[str], *, then: str = "run the same command again"
    ) -> None:
        super().__init__(number, os.strerror(number), os.fspath(path))
        self.then = then

    def __reduce__(self) -> tuple[Any, ...]:  # it may be raised in a process of a cluster
        return functools.partial(type(self), then=self.then), (self.errno, self.filename)

    @property
    def reason(self) -> str:
        """What is wrong, in words and in the system's own."""
        return f"{_REMEDIES[self.errno or 0][0]} ({self.strerror})"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self.errno or 0][1]

    def __str__(self) -> str:
        return (
            f"{self.filename}: cannot be written: {self.reason}; {self.remedy}, then "
            f"{self.then}. What was written before is whole, and nothing of this file is left"
        )


class MovedError(OSError):
    """A folder or file was deleted, moved or replaced while it was being written into."""

    def __init__(self, path: str | os.PathLike[str], *, then: str = "run it again") -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        self.then = then

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), then=self.then), (self.filename,)

    def __str__(self) -> str:
        return (
            f"{self.filename}: was deleted, moved or replaced while it was being written into, so "
            f"nothing more is written. Put it back as it was, then {self.then}; or start anew"
        )


@contextlib.contextmanager
def keeping(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, nothing is written into a folder once it was deleted, moved or replaced.

    :func:`writing` raises :class:`MovedError` instead of filling a new folder of that name.
    """
    path = Path(folder)
    if os.name != "posix" or path in _kept:  # only POSIX can open a folder
        yield
        return
    _kept[path] = os.open(path, os.O_RDONLY)  # held open: no other folder gets its inode number
    try:
        yield
    finally:
        os.close(_kept.pop(path))


def check_there(path: str | os.PathLike[str], descriptor: int) -> None:
    """Raise where a path does not lead to the file or folder that was opened under it."""
    try:
        same = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        same = False
    if not same:
        raise MovedError(path)


def _check_kept(path: str | os.PathLike[str]) -> None:
    for folder, descriptor in list(_kept.items()):
        if Path(path).is_relative_to(folder):
            check_there(folder, descriptor)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` inside (disk full, no rights, no folder) into :class:`NotWrittenError`.

    >>> with writing("runs/demo/config.json"):
    ...     raise OSError(errno.EROFS, "Read-only file system")
    Traceback (most recent call last):
    posttrain.disk.NotWrittenError: runs/demo/config.json: cannot be written: the file system is
    read-only (Read-only file system); mount it writable, or choose another folder, then run the
    same command again. What was written before is whole, and nothing of this file is left
    """
    _check_kept(path)
    try:
        yield
    except (NotWrittenError, MovedError):
        raise
    except Exception as error:
        _check_kept(path)
        number = _number(error)
        if number not in _REMEDIES or (number in _OF_SOME_PATH and not _is_on_the_way(error, path)):
            raise
        raise NotWrittenError(number, path) from error


def _is_on_the_way(error: Exception, path: str | os.PathLike[str]) -> bool:
    """Whether an error names a path, a folder above it, or what is written beside it."""
    if not (filename := getattr(error, "filename", None)):
        return False
    named, path = Path(str(filename)), Path(path)
    return path.is_relative_to(named) or named.name.startswith(f".{path.name}.")


def _number(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else 0


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (``fsync``)."""
    if path.is_dir() and os.name != "posix":  # only POSIX can open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
