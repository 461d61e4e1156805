"""The processes of a Ray that this one has begun, by what they do; found in /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 600.0  # seconds, for what hangs: a busy machine fails no test


def descendants(root: int) -> list[tuple[int, str]]:
    """The number and the title of every process below ``root``."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
            titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    found, frontier = [], [root]
    while frontier:
        below = [pid for pid, parent in parents.items() if parent in frontier]
        found += [(pid, titles[pid]) for pid in below]
        frontier = below
    return found


def actors(kind: str, *, root: int | None = None) -> list[int]:
    """The processes of actors of a class, ``EngineHost`` say, below this process or ``root``."""
    title = f"ray::{kind}"
    return [pid for pid, found in descendants(root or os.getpid()) if found.startswith(title)]


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """End a process as no one can refuse to, or stop it; whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], Any], *, why: str) -> Any:
    """What the condition gives once it is true: what was killed or closed ends when it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{why}: not within {PATIENCE:g} s")
