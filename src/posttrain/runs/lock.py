"""One run folder, one process: a lock of the operating system, which goes when the process goes.

The lock is not the file ``.lock`` but what the kernel knows of it: it is gone with the process that
held it, however that ended, and a copy of the folder is not locked. The file says who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.disk import MovedError, check_there, keeping
from posttrain.runs.folder import make_writable

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE_NAME = ".lock"
_TAKEN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_held: set[int] = set()


class FolderInUseError(RuntimeError):
    """Another process writes into the run folder."""


@contextlib.contextmanager
def held(folder: str | Path) -> Iterator[None]:
    """Keep every other process out of a run folder; it is made where there is none.

    Where it is deleted, moved or replaced meanwhile, writing into it raises an error.
    Where the file system knows no locks, which some network file systems do not, a warning says so.
    """
    folder = Path(folder)
    make_writable(folder)
    descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    _held.add(descriptor)
    try:
        _take(descriptor, folder)
        try:
            check_there(folder / FILE_NAME, descriptor)
        except MovedError:  # whoever held it has removed it, with a new folder where no run began
            raise FolderInUseError(_taken(descriptor, folder)) from None
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            _write(descriptor, _who())
        with keeping(folder):
            yield
        with contextlib.suppress(OSError):
            _write(descriptor, {})
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder, as far as this machine can tell."""
    if fcntl is None:
        return False
    try:
        # A pipe of that name must not wait.
        descriptor = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int, folder: Path, *, patience: float = 1.0) -> None:
    try:
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "this system has no flock")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            if patience > 0 and not _read(descriptor):  # someone only looks whether it is locked
                time.sleep(0.05)
                return _take(descriptor, folder, patience=patience - 0.05)
            raise FolderInUseError(_taken(descriptor, folder)) from None
        warnings.warn(
            f"{folder}: cannot be locked ({error.strerror}); see to it yourself that no other "
            "process writes into this run folder",
            stacklevel=5,
        )


def _taken(descriptor: int, folder: Path) -> str:
    who = _read(descriptor)
    holder = "another process"
    if "pid" in who:
        holder = f"process {who['pid']} on {who.get('host')}, since {who.get('since')},"
    return (
        f"{folder}: {holder} is writing into this run folder; wait until it has finished, stop it, "
        "or choose another run.folder. The lock goes with the process: there is nothing to delete"
    )


def _who() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _write(descriptor: int, who: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    if who:
        os.pwrite(descriptor, json.dumps(who).encode(), 0)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _let_go() -> None:
    """A forked process is not the run: it must not keep the lock when the run is killed."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
