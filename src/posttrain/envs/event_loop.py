"""An event loop in a thread of its own, for libraries whose objects live in one loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines, from any thread, all in one loop; it starts with the first of them.

    A process that was forked starts one of its own, and a pickled copy has none yet.

    >>> async def double(x): return 2 * x
    >>> EventLoop().run(double(3))
    6
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, once it has; other threads' go on meanwhile."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._process != os.getpid():
                self._loop, self._process = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
