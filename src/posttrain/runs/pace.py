"""When a checkpoint by time is due: every so many seconds, and never for more than 1 % of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

SHARE = 0.01  # of the time, at most, that goes into checkpoints by time
Clock = Callable[[], float]


class Pace:
    """Says when a checkpoint is due, by a clock that only goes forward.

    ``seconds`` are asked for between two of them, 0 for none. Where one has taken ``t`` seconds,
    the next comes no sooner than ``t / SHARE`` after it, however few were asked for.

    >>> now = 0.0
    >>> pace = Pace(600, clock=lambda: now)
    >>> with pace.saving():
    ...     now += 2.0
    >>> pace.interval, pace.stretched
    (600.0, False)
    >>> with pace.saving():
    ...     now += 30.0
    >>> pace.interval, pace.stretched
    (3000.0, True)
    """

    def __init__(self, seconds: float, *, clock: Clock) -> None:
        self._asked, self._clock = float(seconds), clock
        self._cost = 0.0
        self._since = clock()

    @property
    def on(self) -> bool:
        """Whether there are checkpoints by time at all."""
        return self._asked > 0

    @property
    def cost(self) -> float:
        """Seconds that the last checkpoint took."""
        return self._cost

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        return max(self._asked, self._cost / SHARE)

    @property
    def stretched(self) -> bool:
        """Whether they come less often than was asked for, because they take too long."""
        return self.on and self.interval > self._asked

    @property
    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self.on and self._clock() - self._since >= self.interval

    def start(self) -> None:
        """Count from now on: what came before is not at stake."""
        self._since = self._clock()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint is written: what it takes is measured, and time counts from its end.

        Only one that was finished counts.
        """
        started = self._clock()
        yield
        self._since = self._clock()
        self._cost = self._since - started
