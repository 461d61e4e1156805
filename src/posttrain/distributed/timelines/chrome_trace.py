"""Spans as a Chrome trace: one row for each actor, to be opened in Perfetto or chrome://tracing.

The Trace Event Format (Google, 2016), JSON: complete events (``"ph": "X"``), ``ts`` and ``dur`` in
microseconds, and metadata events (``"ph": "M"``) that name the rows. A viewer draws the events of a
row inside each other, so events that only overlap get rows of their own.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.distributed.spans import Span, Spans
from posttrain.runs.files import write_text
from posttrain.track.encoding import encode_json

STEPS = 20  # newest ones that are kept
MOST = 20_000  # events: some 3 MB
PAUSE = 5.0  # seconds between two versions of the file, at least
ROWS = ("driver", "learner", "engine", "grading")  # from top to bottom; others follow
PROCESS = 1  # all rows stand in one process of the viewer: one below the other


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The events of a trace; times count from the first of them.

    >>> events = trace_events([Span("engine 0", "sampling", 10.0, 12.5)])
    >>> [(event["ph"], event["args"]) for event in events if event["name"] == "thread_name"]
    [('M', {'name': 'engine 0'})]
    >>> events[-1]["name"], events[-1]["ts"], events[-1]["dur"]
    ('sampling', 0, 2500000)
    """
    known = sorted(spans, key=lambda span: (span.start, -span.end))
    origin = known[0].start if known else 0.0
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    lanes: dict[str, list[list[int]]] = {}  # by actor, for each lane the ends of its open events
    for span in known:
        start, end = _microseconds(span.start - origin), _microseconds(span.end - origin)
        lane = _lane(lanes.setdefault(span.who, []), start, end=end)
        rows.setdefault((span.who, lane), []).append(
            {"name": span.what, "cat": span.who, "ph": "X", "ts": start, "dur": end - start}
        )
    named: list[dict[str, Any]] = [_metadata("process_name", 0, name="posttrain")]
    drawn: list[dict[str, Any]] = []
    for row, (who, lane) in enumerate(sorted(rows, key=_place), start=1):
        named.append(_metadata("thread_name", row, name=f"{who} ({lane + 1})" if lane else who))
        named.append(_metadata("thread_sort_index", row, sort_index=row))
        drawn += [{**event, "pid": PROCESS, "tid": row} for event in rows[who, lane]]
    return named + drawn


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def _lane(lanes: list[list[int]], start: int, *, end: int) -> int:
    """The first lane in which an event stands alone or inside of another; a new one, if none."""
    for number, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            open_ends.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _metadata(what: str, row: int, **given: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": row, "args": given}


def _place(row: tuple[str, int]) -> tuple[int, list[tuple[int, str]], int]:
    """Where a row stands: by kind, then by number, so that engine 10 comes after engine 9."""
    who, lane = row
    kind = next((n for n, name in enumerate(ROWS) if who.startswith(name)), len(ROWS))
    parts = [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", who)]
    return kind, parts, lane


class TraceFile:
    """The last steps of a stage as a file, which is written anew now and then, and at the end.

    What was over before the stage has ``begun`` is left out.
    """

    def __init__(
        self,
        path: Path,
        spans: Spans,
        *,
        begun: float = 0.0,
        steps: int = STEPS,
        pause: float = PAUSE,
    ) -> None:
        self._path, self._spans, self._pause = path, spans, pause
        self._begun: deque[float] = deque([begun], maxlen=steps + 1)  # when each step began
        self._written = -pause

    def stepped(self) -> None:
        """A step has ended: what the oldest one did may be forgotten."""
        self._begun.append(time.time())
        if time.monotonic() - self._written >= self._pause:
            self.write()

    def write(self) -> None:
        """Write what the last steps did."""
        spans = self._spans.all()
        recent = [span for span in spans if span.end > self._begun[0]][-MOST:]
        begun = min((span.start for span in recent), default=0.0)
        when = datetime.fromtimestamp(begun, UTC).isoformat()
        about = {"begun": when, "spans": len(recent), "left out": self._left_out(recent)}
        trace = {"traceEvents": trace_events(recent), "displayTimeUnit": "ms", "otherData": about}
        write_text(self._path, encode_json(trace).decode())
        self._written = time.monotonic()

    def _left_out(self, shown: Sequence[Span]) -> int:
        return len(self._spans.all()) + self._spans.forgotten - len(shown)
