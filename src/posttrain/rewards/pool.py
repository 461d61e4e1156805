"""The grading pool: rewards in processes that can be killed, so that none can hold up a run.

A sample that takes too long, or takes its worker down with it, is the only one that pays: the
worker is replaced, the rest of its chunk is graded by others, and the batch waits for no more than
one time limit.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from posttrain.rewards.bound import BoundReward
from posttrain.rewards.grading import WHOLE_CHUNK, Results, Sample
from posttrain.rewards.worker import Beat, work
from posttrain.types import Score, ScoreState

CHUNK = 64  # samples that a worker gets at a time, at most
SLACK = 0.05  # seconds between a limit and the look at it
START = 30.0  # seconds that a new worker has to begin: copying a large process takes time
Progress = Callable[[int, int], None]


class GradingPool:
    """A :class:`posttrain.rewards.scorer.Grader` that runs rewards in worker processes.

    ``seconds`` is the limit of one sample (of one call, for a reward that takes whole batches),
    ``memory_mb`` what a worker may take beyond what it has when it begins. Workers are copies of
    this process (``fork``): a reward may be any function, but changes it makes to variables stay in
    its worker. ``progress`` is told how many of the samples are graded. Not for several threads at
    the same time.
    """

    def __init__(
        self,
        rewards: Sequence[BoundReward],
        *,
        workers: int = 2,
        seconds: float = 10.0,
        memory_mb: int = 2048,
        progress: Progress | None = None,
    ) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ValueError(
                "grading.workers: this system cannot copy processes (fork), so rewards cannot run "
                "in workers; set grading.workers to 0 to run them inside this process"
            )
        self._rewards = tuple(rewards)
        self._limits = {"seconds": seconds, "memory_mb": memory_mb}
        self._seconds = seconds
        self._progress = progress
        self._workers = [self._hire() for _ in range(workers)]
        atexit.register(self.close)

    def __call__(self, rewards: Sequence[BoundReward], samples: Sequence[Sample]) -> list[Results]:
        """Grade samples; the rewards must be those that the workers were made with."""
        assert tuple(rewards) == self._rewards, "a pool is made for its rewards"
        self._replace_orphans()
        job = _Job(samples, num_workers=len(self._workers), progress=self._progress)
        try:
            while not job.finished:
                self._hand_out(job)
                self._listen(job)
                self._look_for_the_late(job)
        except BaseException:  # an interrupt: what the workers still say belongs to no job
            self._restart()
            raise
        return job.results()

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _hire(self) -> _Worker:
        return _Worker(self._rewards, self._limits)

    def _restart(self) -> None:
        for position, worker in enumerate(self._workers):
            worker.kill()
            self._workers[position] = self._hire()

    def _replace_orphans(self) -> None:
        """Linux ends a worker with the thread that made it: that thread may be gone by now."""
        for position, worker in enumerate(self._workers):
            if not worker.hired_by.is_alive():
                worker.kill()
                self._workers[position] = self._hire()

    def _hand_out(self, job: _Job) -> None:
        for worker in self._workers:
            if worker.idle and job.waiting:
                worker.start(*job.take())

    def _listen(self, job: _Job) -> None:
        busy = {worker.connection: worker for worker in self._workers if not worker.idle}
        until = min((w.since + self._allowed(w) for w in busy.values()), default=0.0)
        patience = max(0.0, until - time.monotonic()) + SLACK
        for connection in wait(list(busy), timeout=min(patience, 1.0)):
            worker = busy[connection]  # type: ignore[index]
            try:
                for number, results in worker.receive():
                    job.finish(number, results)
            except (EOFError, OSError):
                self._replace(worker, job, state="crashed", reason=worker.obituary())

    def _look_for_the_late(self, job: _Job) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.idle and now - worker.since > self._allowed(worker):
                reason = f"gave no answer within {self._allowed(worker):g} s"
                self._replace(worker, job, state="timeout", reason=reason)

    def _allowed(self, worker: _Worker) -> float:
        """The limit of the reward that a worker is at: ours, or what the reward itself needs."""
        return max(self._seconds, self._rewards[worker.beat.read()[1]].longest_call)

    def _replace(self, worker: _Worker, job: _Job, *, state: ScoreState, reason: str) -> None:
        """Put a new worker in the place of one that died or must; only the culprit pays."""
        worker.kill()  # first: what a worker at work says it is at may change
        sample, reward, since = worker.beat.read()
        left = [number for number in worker.chunk if not job.known(number)]
        name = self._rewards[reward].name
        culprit = left[0] if len(left) == 1 else None
        if sample != WHOLE_CHUNK and worker.chunk[sample] in left:
            culprit = worker.chunk[sample]
        if state == "timeout" and time.monotonic() - since <= self._allowed(worker):
            culprit = None  # it answered at the last moment and was at another sample already
        if culprit is not None:
            score = Score(value=0.0, state=state, reason=f"reward {name!r} {reason}")
            job.excuse(culprit, reward, result=(name, score))
            others = len(job.without(culprit)) < len(self._rewards)
            if not self._rewards[reward].monitored or not others:  # else those have their say
                job.finish(culprit, [])
        job.again([number for number in left if not job.known(number)])
        self._workers[self._workers.index(worker)] = self._hire()


class _Job:
    """One batch of samples: which wait, which are graded."""

    def __init__(
        self, samples: Sequence[Sample], *, num_workers: int, progress: Progress | None
    ) -> None:
        self._samples = samples
        self._results: dict[int, Results] = {}
        self._excused: dict[int, dict[int, tuple[str, Score]]] = {}
        self._progress = progress
        size = max(1, min(CHUNK, math.ceil(len(samples) / (4 * max(1, num_workers)))))
        numbers = list(range(len(samples)))
        self.waiting = deque(numbers[start : start + size] for start in numbers[::size])

    @property
    def finished(self) -> bool:
        return len(self._results) == len(self._samples)

    def take(self) -> tuple[list[tuple[int, Sample]], set[int]]:
        """The next chunk, and the rewards that are not to be asked about it."""
        numbers = self.waiting.popleft()
        return [(number, self._samples[number]) for number in numbers], self.without(numbers[0])

    def without(self, number: int) -> set[int]:
        """The rewards that are asked no more about a sample."""
        return set(self._excused.get(number, {}))

    def known(self, number: int) -> bool:
        return number in self._results

    def finish(self, number: int, results: Results) -> None:
        if not 0 <= number < len(self._samples):
            raise ValueError(f"a grading worker answered about sample {number}, which is none")
        self._results.setdefault(number, [*results, *self._excused.get(number, {}).values()])
        if self._progress is not None:
            self._progress(len(self._results), len(self._samples))

    def excuse(self, number: int, reward: int, *, result: tuple[str, Score]) -> None:
        """Ask a reward no more about a sample, which took the worker down: this is its result."""
        self._excused.setdefault(number, {})[reward] = result

    def again(self, numbers: Sequence[int]) -> None:
        """Each by itself: whoever takes the next worker down is found out, and no one else is."""
        self.waiting.extendleft([number] for number in reversed(numbers))

    def results(self) -> list[Results]:
        return [self._results[number] for number in range(len(self._samples))]


class _Worker:
    """A worker process, its line, and what it is at."""

    def __init__(self, rewards: Sequence[BoundReward], limits: dict[str, Any]) -> None:
        self.beat = Beat()
        self.chunk: list[int] = []
        self.hired_by = threading.current_thread()
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_begin,
            args=(theirs, self.connection),
            kwargs={"rewards": rewards, "beat": self.beat, **limits},
            daemon=True,
        )
        with warnings.catch_warnings():  # the copy runs nothing of what other threads were at
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    @property
    def idle(self) -> bool:
        return not self.chunk

    @property
    def since(self) -> float:
        """When what it is at began."""
        return self.beat.read()[2]

    def start(self, chunk: list[tuple[int, Sample]], without: set[int]) -> None:
        self.chunk = [number for number, _ in chunk]
        first = next(reward for reward in itertools.count() if reward not in without)
        self.beat.write(0, first, since=time.monotonic() + START)  # until it says otherwise
        self.connection.send((chunk, without))

    def receive(self) -> list[tuple[int, Results]]:
        message = json.loads(self.connection.recv_bytes())
        found = [
            (number, [(name, Score(**score)) for name, score in results])
            for number, results in message["results"]
        ]
        if message["last"]:
            self.chunk = []
        return found

    def obituary(self) -> str:
        """How it died."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"ended its worker process ({signal.Signals(-code).name})"
        return f"ended its worker process (exit code {code})"

    def kill(self) -> None:
        """End it and what it started."""
        if self._process.pid is not None and self._process.is_alive():
            for end in (os.killpg, os.kill):
                try:
                    end(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        self._process.join(5.0)
        self.connection.close()


def _begin(theirs: Connection, ours: Connection, **given: Any) -> None:
    """The first thing in the new process: close the copy of the other end, then work."""
    ours.close()
    work(theirs, given.pop("rewards"), **given)
