"""Whether other processes take the cores that a run computes on, and what that costs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

WINDOW = 5  # steps
SLOWER, WAITING = 2.0, 0.5
_THREADS = Path("/proc/self/task")


def waited_for_cores() -> float | None:
    """Seconds that threads of this process were ready to run and had no core; None: not known.

    Linux tells it for each thread, in nanoseconds (``Documentation/scheduler/sched-stats.rst``).
    """
    try:
        told = [(thread / "schedstat").read_text() for thread in list(_THREADS.iterdir())]
        return sum(int(line.split()[1]) for line in told) / 1e9
    except (OSError, IndexError, ValueError):  # another system, or a thread that has just ended
        return None


class Neighbours:
    """Follows the steps of a run, and says it once when others have made them slower."""

    def __init__(
        self,
        *,
        waited: Callable[[], float | None] = waited_for_cores,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waited, self._clock = waited, clock
        self._latest = waited(), clock()
        self._steps: list[tuple[float, float]] = []  # seconds a token, share of time that waited
        self._share = 0.0
        self._said = False

    def waited(self) -> float | None:
        """Seconds without a core since the last step, of all threads; None: not known."""
        (before, begun), (now, ended) = self._latest, (self._waited(), self._clock())
        self._latest = now, ended
        self._share = 0.0
        if before is None or now is None:
            return None
        spent = max(0.0, now - before)  # a thread that ended takes its count with it
        self._share = spent / max(ended - begun, 1e-9)
        return spent

    def remark(self, seconds_per_token: float) -> str:
        """What to tell the user after a step, of which :meth:`waited` was asked; mostly nothing."""
        self._steps.append((seconds_per_token, self._share))
        if self._said or len(self._steps) <= 2 * WINDOW:
            return ""
        first = statistics.median(pace for pace, _ in self._steps[1 : 1 + WINDOW])
        del self._steps[1 + WINDOW : -WINDOW]
        lately = self._steps[-WINDOW:]
        if any(pace < SLOWER * first or share < WAITING for pace, share in lately):
            return ""
        self._said = True
        times = statistics.median(pace for pace, _ in lately) / first
        fewer = (
            " To go on with fewer threads: posttrain run RECIPE --resume --run.threads 1 "
            "--allow-changes run.threads, which rounds differently."
            if torch.get_num_threads() > 1
            else ""
        )
        return (
            f"steps take {times:.1f} times as long a token as at first, because other processes "
            f"use the cores: threads of this run wait for one. The numbers are the same.{fewer}"
        )
