"""Several trackers as one, and one that may fail."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping

from posttrain.protocols import Tracker
from posttrain.track.sample_table import Rows, log_samples


class Several:
    """Passes every call on, in order. ``contextlib.closing`` makes it a context.

    Every tracker is closed, also when the closing of another fails; the failure is then raised.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step with every tracker."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_samples(self, step: int, rows: Rows) -> None:
        """Hand rollouts to every tracker that takes them."""
        for tracker in self._trackers:
            log_samples(tracker, step, rows=rows)

    def close(self) -> None:
        """Close every tracker."""
        with contextlib.ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


class Dropped:
    """A tracker that is left out, with a warning, from where it raises.

    ``used`` has False for its name then. The metrics are in the run folder all the same.
    """

    def __init__(self, tracker: Tracker, *, name: str, used: dict[str, bool]) -> None:
        self._tracker, self._name, self._used = tracker, name, used

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, unless it has failed before."""
        self._try(lambda: self._tracker.log(step, metrics), f"at step {step}")

    def log_samples(self, step: int, rows: Rows) -> None:
        """Hand it rollouts, where it takes them, unless it has failed before."""
        self._try(lambda: log_samples(self._tracker, step, rows=rows), f"at step {step}")

    def close(self) -> None:
        """Close it, also where it has failed."""
        self._try(self._tracker.close, "when it was closed", always=True)

    def _try(self, work: Callable[[], None], when: str, *, always: bool = False) -> None:
        try:
            if always or self._used[self._name]:
                work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no reason to end a run
            if self._used[self._name]:
                leave_out(self._name, error, when=when, used=self._used)


def leave_out(name: str, error: Exception, *, when: str, used: dict[str, bool]) -> None:
    """Drop a tracker that has raised, and say so."""
    used[name] = False
    warnings.warn(
        f"tracker {name!r}: {type(error).__name__} {when}: {error}; it is left out for "
        "the rest of the run, which goes on, and metrics.jsonl has all numbers",
        stacklevel=4,
    )
