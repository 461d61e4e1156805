"""Failures to write, said so that a user can act: which path, what is wrong, what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("the file is larger than allowed (ulimit -f)", "raise the limit"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or choose another folder"),
    errno.EACCES: ("permission is missing", "change the permissions, or choose another folder"),
    errno.EPERM: ("permission is missing", "change the permissions, or choose another folder"),
    errno.EIO: ("the disk reports an error", "look at the system's log, or choose another disk"),
}
# Libraries in Rust (safetensors, tokenizers) raise no OSError, but their text has its number.
_NUMBER = re.compile(r"\(os error (\d+)\)")


class NotWrittenError(OSError):
    """A file could not be written; the message says why, what to do, and how to go on ``then``."""

    def __init__(
        self, number: int, path: str | os.PathLike[str], *, then: str = "run the same command again"
    ) -> None:
        super().__init__(number, os.strerror(number), os.fspath(path))
        self.then = then

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


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever inside fails to write ``path`` for want of room or rights says so.

    >>> with writing("runs/demo/config.json"):
    ...     raise OSError(errno.EROFS, "Read-only file system")
    Traceback (most recent call last):
    posttrain.disk.NotWrittenError: runs/demo/config.json: cannot be written: the file system is
    read-only (Read-only file system); mount it writable, or choose another folder, then run the
    same command again. What was written before is whole, and nothing of this file is left
    """
    try:
        yield
    except NotWrittenError:
        raise
    except Exception as error:
        number = _number(error)
        if number not in _REMEDIES:
            raise
        raise NotWrittenError(number, path) from error


def _number(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else 0


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
