"""The inside of a worker that hosts episodes: a process of its own, which can be killed.

It gets jobs from its parent process, and answers in lines of JSON: the parent parses them, and
never unpickles what a worker sends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import threading
from multiprocessing.connection import Connection
from typing import IO, Any

from posttrain.envs.episodes import Episodes
from posttrain.envs.plain_answers import Plain, failed
from posttrain.forked import settle

_ARENA_MAX = -8  # of mallopt
STACK_MB = 8  # address space of a thread, which the memory limit counts


def work(
    line: Connection, env: Any, *, other_end: Connection, threads: int, memory_mb: int
) -> None:
    """Run jobs until the parent closes its end of the pipe, of which a fork has a copy."""
    other_end.close()
    _few_arenas()
    threading.stack_size(STACK_MB * 2**20)
    settle(memory_mb + (threads + 1) * STACK_MB)
    answers = open(line.fileno(), "wb", closefd=False)  # noqa: SIM115 - while the worker lives
    outbox = _Outbox(answers)
    try:
        episodes = Episodes(env, threads=threads)
    except Exception as error:  # noqa: BLE001 - told to the parent
        told = failed(error, inside=__file__)
        outbox.send({"refused": told.reason, "details": told.details})
        return
    outbox.send({"methods": sorted(episodes.methods)})
    while True:
        try:
            job = line.recv()
        except (EOFError, OSError):  # OSError: the message was cut short
            return
        episodes.submit(job, functools.partial(outbox.answer, number=job.number))


class _Outbox:
    """Sends one line at a time, whoever asks."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers
        self._lock = threading.Lock()

    def answer(self, answer: Plain, stuck: bool, *, number: int) -> None:
        self.send({"number": number, "answer": answer, "stuck": stuck})

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(message).encode() + b"\n")
            self._answers.flush()


def _few_arenas() -> None:
    """Let threads share glibc's heaps: each of their own would take 64 MB of address space."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)
