"""Kills grading workers under a run: idle ones, busy ones, and those that are just being chosen.

At most ``TRIES - 1`` in a batch: a sample at which one worker more has died is taken for the cause,
and rightly so. Whatever the moments, the run must end as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.rewards import pool

LONGEST = 0.01  # seconds between the moment a worker is given work and its death


@contextlib.contextmanager
def killing_workers(generator: random.Random, log: Path) -> Iterator[None]:
    """Inside, grading pools of this process lose workers; ``log`` has a line for each."""
    grade, start = pool.GradingPool.__call__, pool._Worker.start
    left, batch = 0, itertools.count(1)

    def kill(worker: Any, when: str, *, chance: float) -> None:
        nonlocal left
        if left and generator.random() < chance and worker._process.is_alive():
            left -= 1
            os.kill(worker._process.pid, signal.SIGKILL)
            with log.open("a") as file:
                file.write(f"{when}\n")

    def graded(self: Any, *given: Any) -> Any:
        nonlocal left
        left = pool.TRIES - 1
        kill(generator.choice(self._workers), "idle", chance=1.0 if next(batch) % 2 else 0.0)
        if generator.random() < 0.5:
            time.sleep(generator.uniform(0, LONGEST))  # now it is dead, or may be
        return grade(self, *given)

    def started(self: Any, *work: Any) -> None:
        kill(self, "chosen", chance=0.1)
        start(self, *work)
        if left and generator.random() < 0.5:
            time.sleep(generator.uniform(0, LONGEST))
            kill(self, "busy", chance=1.0)

    pool.GradingPool.__call__, pool._Worker.start = graded, started  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.GradingPool.__call__, pool._Worker.start = grade, start  # type: ignore[method-assign]


def counted(log: Path) -> dict[str, int]:
    """How many workers were killed, by what they were at."""
    found = Counter(log.read_text().split() if log.exists() else [])
    return {f"{when} workers killed": number for when, number in sorted(found.items())}
