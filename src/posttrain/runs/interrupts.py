"""Ctrl-C and SIGTERM: the first lets the step under way end and be saved, the second stops now."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nposttrain: finishing this step, then saving; once more stops now\n"


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; ``number`` is the signal, ``saved`` the step it can go on from."""

    def __init__(self, number: int, *, saved: int | None = None) -> None:
        super().__init__()
        self.number = number
        self.saved = saved


class Interrupts:
    """Takes both signals while the block lasts; only the main thread of a process can.

    Inside :meth:`stepping` the first one is only noted, and :meth:`check` raises it when a step is
    done. Elsewhere nothing is worth waiting for, and it raises at once; should a library swallow
    that, :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._stepping = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    @property
    def asked(self) -> bool:
        """Whether the run is to stop after this step."""
        return self._asked is not None

    def check(self, *, saved: int | None = None) -> None:
        """Raise where the run was asked to stop."""
        if self._asked is not None:
            raise Stopped(self._asked, saved=saved)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, steps are taken, and each ends with :meth:`check`."""
        self._stepping += 1  # of several loops that take turns, each is inside
        try:
            yield
        finally:
            self._stepping -= 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._taken) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        stop = error
        while stop is not None and not isinstance(stop, KeyboardInterrupt):
            stop = stop.__cause__ or stop.__context__
        if isinstance(stop, Stopped) and isinstance(error, Exception):
            # Raised where Python or a library makes another error of it: in __set_name__, say.
            raise Stopped(stop.number, saved=stop.saved) from error

    def _taken(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a copy that has not settled yet: it has nothing to say
            os._exit(128 + number)
        again, self._asked = self._asked is not None, number
        if again or not self._stepping:
            raise Stopped(number)
        with contextlib.suppress(OSError):  # not print: the signal may have come in a print
            os.write(2, NOTICE)
