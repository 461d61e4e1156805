"""The inside of a grading worker: a process of its own, which can be killed.

It gets chunks of samples from the process that made it, and answers in lines of JSON: what a worker
says is parsed, never unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from posttrain.rewards.bound import BoundReward
from posttrain.rewards.grading import WHOLE_CHUNK, Results, grade

FLUSH_AFTER = 0.005  # seconds that a finished result may wait to be sent
NOT_BEGUN = -2  # in place of a sample's number, until a worker has begun with what it got
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG


class Beat:
    """What a worker is at and since when, in memory that both sides see.

    Each of the three is written in one go: the other side may read at any moment, and must never
    see a half-written time (``struct.pack_into`` would show it a zero in between).
    """

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 24))
        self._since = memory[:8].cast("d")  # the clock is the same for all processes
        self._place = memory[8:].cast("q")

    def write(self, sample: int, reward: int, *, since: float | None = None) -> None:
        """Say that a reward is about to run on a sample: now, or from a time on."""
        self._since[0] = time.monotonic() if since is None else since
        self._place[1] = reward
        self._place[0] = sample

    def read(self) -> tuple[int, int, float]:
        """The sample, the reward, and when it began."""
        return self._place[0], self._place[1], self._since[0]


def work(
    line: Connection,
    rewards: Sequence[BoundReward],
    *,
    other_end: Connection,
    beat: Beat,
    seconds: float,
    memory_mb: int,
) -> None:
    """Grade chunks until the other side hangs up; of its end, this process has a copy."""
    other_end.close()
    _settle(memory_mb)
    answers = open(line.fileno(), "wb", closefd=False)  # noqa: SIM115 - while the worker lives
    while True:
        try:
            numbers, without = line.recv()
            asked = next(reward for reward in itertools.count() if reward not in without)
            beat.write(WHOLE_CHUNK, asked)  # begun: samples may be more than there is memory for
            samples = line.recv()
        except (EOFError, OSError):  # the latter where it was cut short
            return
        outbox = _Outbox(answers, numbers)
        grade(
            rewards,
            samples,
            started=beat.write,
            done=outbox.add,
            seconds=seconds,
            without=without,
            in_worker=True,
        )
        outbox.send(last=True)


class _Outbox:
    """Results on their way: few messages while all goes fast, none kept back when it does not."""

    def __init__(self, answers: IO[bytes], numbers: Sequence[int]) -> None:
        self._answers = answers
        self._numbers = numbers
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def add(self, index: int, results: Results) -> None:
        """Put in the results of a sample of the chunk."""
        scores = [[name, vars(score)] for name, score in results]
        self._waiting.append([self._numbers[index], scores])
        if time.monotonic() - self._sent > FLUSH_AFTER:
            self.send(last=False)

    def send(self, *, last: bool) -> None:
        """Send what waits; ``last`` says that the chunk is finished."""
        message = json.dumps({"results": self._waiting, "last": last})
        self._answers.write(message.encode() + b"\n")
        self._answers.flush()
        self._waiting, self._sent = [], time.monotonic()


def _settle(memory_mb: int) -> None:
    """A session of its own, dead when its parent is, with no input and little memory to take.

    What it prints goes to stderr: stdout is the run's.
    """
    gc.freeze()  # what the copy began with is never freed: it may wait for threads left behind
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
        # Not the streams of before: a live display may stand behind them, and hold a lock for ever.
        errors = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = errors
    held = _address_space()
    if held:
        limit = held + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ImportError):  # after a fork, torch's threads are not there
        import torch

        torch.set_num_threads(1)


def _address_space() -> int:
    """Bytes of address space in use, most of it shared with the parent; 0 where unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
