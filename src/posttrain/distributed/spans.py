"""Who did what, and when: what a timeline of a step across processes is drawn from."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

KEPT = 50_000  # spans of one recorder: some 5 MB, and hundreds of steps


class Span(NamedTuple):
    """A stretch of time that one actor spent on one thing, in seconds since the epoch.

    The clock is the machine's own, so spans of several processes on it line up; between machines
    they are as far apart as their clocks.
    """

    who: str  # the row of the timeline: "driver", "learner 0", "engine 1"
    what: str  # "sampling", "step", "sync"
    start: float
    end: float


class Spans:
    """Collects spans, from any thread; of more than ``kept`` the oldest are forgotten.

    >>> spans = Spans()
    >>> with spans.record("driver", "sampling"):
    ...     pass
    >>> spans.add(Span("engine 0", "sync", 1.0, 3.0))
    >>> [(span.who, span.what) for span in spans.all()]
    [('driver', 'sampling'), ('engine 0', 'sync')]
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=kept)
        self._added = 0

    @contextlib.contextmanager
    def record(self, who: str, what: str) -> Iterator[None]:
        """Record how long the block takes, also where it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.add(Span(who, what, start, max(start, time.time())))  # a clock may be set back

    def add(self, span: Span) -> None:
        """Add a span that was measured elsewhere."""
        with self._lock:
            self._spans.append(span)
            self._added += 1

    def all(self) -> list[Span]:
        """Those that are kept, in the order in which they were added."""
        with self._lock:
            return list(self._spans)

    @property
    def forgotten(self) -> int:
        """How many were added and are kept no more."""
        with self._lock:
            return self._added - len(self._spans)
