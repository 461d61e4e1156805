"""How many threads of a CPU compute: torch keeps a number for each thread, and one for new ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock

import torch

_INSIDE: list[int] = []  # for each thread inside computing_threads, what the process was given
# Held where a thread starts another. Until the new one runs, CPython 3.11 knows it by the number of
# its starter: an exception that is raised in the starter by that number would end the new one.
STARTING = Lock()


@contextmanager
def computing_threads(alone: bool) -> Iterator[None]:
    """One thread computes inside where it is to be ``alone``, else as many as the process has."""
    with STARTING:
        number = _INSIDE[0] if _INSIDE else _given_threads()
        _INSIDE.append(number)
    try:
        torch.set_num_threads(1 if alone else number)
        yield
    finally:
        with STARTING:
            _INSIDE.pop()
        torch.set_num_threads(number)


def _given_threads() -> int:
    """As a thread that is new to torch is told: one that came while another sampled has kept 1."""
    with ThreadPoolExecutor(1) as new:
        return new.submit(torch.get_num_threads).result()


def single_threads(count: int) -> ThreadPoolExecutor:
    """``count`` threads that each compute alone; the process keeps the number that it has."""
    with STARTING:  # torch tells new threads the number that was set last, by whichever thread
        number = _INSIDE[0] if _INSIDE else _given_threads()
        pool = ThreadPoolExecutor(count, "replica", initializer=_compute_alone)
        started = Barrier(count)
        for future in [pool.submit(started.wait) for _ in range(count)]:
            future.result()
        with ThreadPoolExecutor(1) as other:
            other.submit(torch.set_num_threads, number).result()
    return pool


def _compute_alone() -> None:
    torch.get_num_threads()  # torch gives a thread the number of the process when first asked
    torch.set_num_threads(1)
