"""Threads that are started while a batch is broken off."""

from __future__ import annotations

import contextlib
import threading

from posttrain.cpu_threads import computing_threads
from posttrain.rollout import run_ahead


def test_a_thread_that_is_broken_off_while_it_starts_another_ends() -> None:
    """Until a new thread runs, CPython 3.11 knows it by the number of its starter."""
    for _ in range(150):
        busy = threading.Event()

        def work(busy: threading.Event = busy) -> None:
            with contextlib.suppress(run_ahead._Closed):
                while True:
                    with computing_threads(alone=True):
                        busy.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        busy.wait()
        run_ahead._interrupt(thread)
        thread.join(60)
        assert not thread.is_alive()
