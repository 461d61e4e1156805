"""The inside of a grading worker: a process of its own, which can be killed.

It gets chunks of samples from its parent process, and answers in lines of JSON: the parent parses
them, and never unpickles what a worker sends.
"""

from __future__ import annotations

import itertools
import json
import mmap
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from posttrain.forked import settle
from posttrain.rewards.bound import BoundReward
from posttrain.rewards.grading import WHOLE_CHUNK, Results, grade

FLUSH_AFTER = 0.005  # seconds that a finished result may wait to be sent
NOT_BEGUN = -2  # instead of a sample's index, until a worker has started on its chunk


class Status:
    """A worker's current sample and reward and when they began, in memory shared with the parent.

    Each of the three is written atomically: the parent may read at any moment, and must never see
    a half-written time (``struct.pack_into`` would show it a zero in between).
    """

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 24))
        self._since = memory[:8].cast("d")  # the monotonic clock is the same in all processes
        self._place = memory[8:].cast("q")

    def write(self, sample: int, reward: int, *, since: float | None = None) -> None:
        """Record that a reward runs on a sample from now, or from ``since``."""
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
    status: Status,
    seconds: float,
    memory_mb: int,
) -> None:
    """Grade chunks until the parent closes its end of the pipe, of which a fork has a copy."""
    other_end.close()
    settle(memory_mb)
    answers = open(line.fileno(), "wb", closefd=False)  # noqa: SIM115 - while the worker lives
    while True:
        try:
            numbers, without = line.recv()
            asked = next(reward for reward in itertools.count() if reward not in without)
            # Started: receiving the samples may itself exceed the memory limit.
            status.write(WHOLE_CHUNK, asked)
            samples = line.recv()
        except (EOFError, OSError):  # OSError: the message was cut short
            return
        outbox = _Outbox(answers, numbers)
        grade(
            rewards,
            samples,
            started=status.write,
            done=outbox.add,
            seconds=seconds,
            without=without,
            in_worker=True,
        )
        outbox.send(last=True)


class _Outbox:
    """Buffers results: few messages while rewards are fast, no delay while they are slow."""

    def __init__(self, answers: IO[bytes], numbers: Sequence[int]) -> None:
        self._answers = answers
        self._numbers = numbers
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def add(self, index: int, results: Results) -> None:
        """Add the results of a sample of the chunk."""
        scores = [[name, vars(score)] for name, score in results]
        self._waiting.append([self._numbers[index], scores])
        if time.monotonic() - self._sent > FLUSH_AFTER:
            self.send(last=False)

    def send(self, *, last: bool) -> None:
        """Send the buffered results; ``last`` says that the chunk is finished."""
        message = json.dumps({"results": self._waiting, "last": last})
        self._answers.write(message.encode() + b"\n")
        self._answers.flush()
        self._waiting, self._sent = [], time.monotonic()
