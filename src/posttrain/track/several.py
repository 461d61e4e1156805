"""Several trackers as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from posttrain.protocols import Tracker


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

    def close(self) -> None:
        """Close every tracker."""
        with contextlib.ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)
