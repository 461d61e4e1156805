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

    ``drop`` is called with its name then. The metrics are in the run folder all the same.
    """

    def __init__(self, tracker: Tracker, *, name: str, drop: Callable[[str], None]) -> None:
        self._tracker, self._name, self._drop = tracker, name, drop
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, unless it has failed before."""
        self._try(lambda: self._tracker.log(step, metrics), step)

    def log_samples(self, step: int, rows: Rows) -> None:
        """Hand it rollouts, where it takes them, unless it has failed before."""
        self._try(lambda: log_samples(self._tracker, step, rows=rows), step)

    def _try(self, work: Callable[[], None], step: int) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no reason to end a run
            self._warn(error, when=f"at step {step}")

    def close(self) -> None:
        """Close it, also where it has failed."""
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - as above
            if not self._failed:
                self._warn(error, when="when it was closed")

    def _warn(self, error: Exception, *, when: str) -> None:
        self._failed = True
        self._drop(self._name)
        warnings.warn(
            f"tracker {self._name!r}: {type(error).__name__} {when}: {error}; it is left out for "
            "the rest of the run, which goes on, and metrics.jsonl has all numbers",
            stacklevel=4,
        )
