"""The grading pool: rewards in processes that can be killed, so that none can hold up a run.

A sample that takes too long, or takes its worker down with it again and again, is the only one
that pays: the worker is replaced, and the rest of its chunk is graded by others. A worker may also
die for no fault of the sample it is at (the system was short of memory, a thread that an earlier
sample left behind crashed), or while it waits for work: what it had is handed out again. (The pool
of the library pebble ends for good with a worker that is killed while it waits.)
"""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from posttrain.rewards.bound import BoundReward
from posttrain.rewards.grading import WHOLE_CHUNK, Results, Sample
from posttrain.rewards.pool_worker import NOT_BEGUN, Beat, work
from posttrain.types import Score

CHUNK = 64  # samples that a worker gets at a time, at most
SLACK = 0.05  # seconds between a limit and the look at it
START = 30.0  # seconds that a new worker has to begin: copying a large process takes time
TRIES = 3  # workers that end while they are at a sample before it is taken to be the cause
VAIN = 10  # workers in a row that end before they have begun with anything
PAUSES = (0.1, 1.0, 5.0)  # seconds before a new process is tried again
Progress = Callable[[int, int], None]


class GradingPool:
    """A :class:`posttrain.rewards.scorer.Grader` that runs rewards in worker processes.

    ``seconds`` is the limit of one sample (of one call, for a reward that takes whole batches),
    ``memory_mb`` what a worker may take beyond what it has when it begins. Workers are copies of
    this process (``fork``): a reward may be any function, but changes it makes to variables stay in
    its worker. ``progress`` is told how many of the samples are graded; ``died`` counts the workers
    that ended by themselves and were replaced. Not for several threads at the same time.
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
        self.died = self._in_vain = 0
        self._workers = [self._hire() for _ in range(workers)]
        atexit.register(self.close)

    def __call__(self, rewards: Sequence[BoundReward], samples: Sequence[Sample]) -> list[Results]:
        """Grade samples; the rewards must be those that the workers were made with."""
        assert tuple(rewards) == self._rewards, "a pool is made for its rewards"
        assert self._workers, "the pool is closed"
        job = _Job(samples, num_workers=len(self._workers), progress=self._progress)
        try:
            while not job.finished:
                self._hand_out(job)
                self._listen(job)
                self._look_for_the_late(job)
        except BaseException:  # an interrupt: what the workers still say belongs to no job
            for worker in self._workers:
                worker.kill()
            raise
        return [job.results[number] for number in range(len(samples))]

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _hire(self) -> _Worker:
        for pause in (*PAUSES, 0.0):
            try:
                return _Worker(self._rewards, self._limits)
            except OSError as error:  # no memory, process or file is left: another may end soon
                failure = error
                time.sleep(pause)
        raise RuntimeError(
            f"grading: no worker process can be started ({failure}); free memory, processes or "
            "open files, or lower grading.workers (0 grades inside this process)"
        ) from failure

    def _renew(self, worker: _Worker) -> _Worker:
        """A new worker in the place of another."""
        worker.kill()
        new = self._workers[self._workers.index(worker)] = self._hire()
        return new

    def _hand_out(self, job: _Job) -> None:
        while job.waiting:
            idle = [worker for worker in self._workers if worker.idle]
            if not idle:
                return
            # A new one first: what waits first may have ended a worker, and is to be tried where
            # nothing that others left behind can.
            worker = min(idle, key=lambda worker: worker.used)
            # Linux ends a worker with the thread that made it: that thread may be gone by now.
            dismissed = worker.killed or not worker.hired_by.is_alive()
            if worker.ended or dismissed:
                self.died += not dismissed
                worker = self._renew(worker)
            try:
                worker.start(*job.take())
            except OSError:  # it died since, or does not read
                self._replace(worker, job)

    def _listen(self, job: _Job) -> None:
        busy = {worker.line: worker for worker in self._workers if not worker.idle}
        until = min((w.since + self._allowed(w) for w in busy.values()), default=0.0)
        patience = max(0.0, until - time.monotonic()) + SLACK
        for line in wait(list(busy), timeout=min(patience, 1.0)):
            worker = busy[line]  # type: ignore[index]
            try:
                found = worker.receive()
            except (EOFError, OSError, ValueError, KeyError, TypeError):  # dead, or out of its mind
                self._replace(worker, job)
                continue
            self._in_vain = 0
            for number, results in found:
                job.finish(number, results)

    def _look_for_the_late(self, job: _Job) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if not worker.idle]:
            ended = worker.ended  # before the look at what it said: nothing comes after it
            if wait([worker.line], timeout=0):
                continue  # an answer, which is read first, however late this process comes to it
            if ended:
                self._replace(worker, job)  # something that it started holds its line open
            elif now - worker.since > self._allowed(worker):
                self._replace(worker, job, late=True)

    def _allowed(self, worker: _Worker) -> float:
        """The limit of the reward that a worker is at: ours, or what the reward itself needs."""
        return max(self._seconds, self._rewards[worker.beat.read()[1]].longest_call)

    def _replace(self, worker: _Worker, job: _Job, *, late: bool = False) -> None:
        """Put a new worker in the place of one that died or must; only the culprit pays."""
        end = worker.end(wait=not late)
        self.died += not late
        self._renew(worker)  # first: what a worker at work says it is at may change
        sample, reward, since = worker.beat.read()
        if sample == NOT_BEGUN:
            self._count_vain(end)
            job.waiting.appendleft(worker.chunk)
            return
        left = [number for number in worker.chunk if number not in job.results]
        suspect = left[0] if len(left) == 1 else None
        if sample != WHOLE_CHUNK and worker.chunk[sample] in left:
            suspect = worker.chunk[sample]
        if late and time.monotonic() - since <= self._allowed(worker):
            suspect = None  # it answered at the last moment and was at another sample already
        if suspect is not None:
            job.tries[suspect] += 1
        if suspect is not None and (late or job.tries[suspect] == TRIES):
            name = self._rewards[reward].name
            reason = f"reward {name!r} ended its worker process ({end}), {TRIES} times"
            if late:
                reason = f"reward {name!r} gave no answer within {self._allowed(worker):g} s"
            score = Score(value=0.0, state="timeout" if late else "crashed", reason=reason)
            job.excused[suspect][reward] = (name, score)
            del job.tries[suspect]  # the other rewards have theirs
            others = len(job.excused[suspect]) < len(self._rewards)
            if not self._rewards[reward].monitored or not others:  # else those have their say
                job.finish(suspect, [])
        again = [number for number in left if number not in job.results]
        # Each by itself: whoever takes the next worker down is found out, and no one else is.
        again.sort(key=lambda number: number != suspect)
        job.waiting.extendleft([number] for number in reversed(again))

    def _count_vain(self, end: str) -> None:
        """One more worker that has not begun, for which no sample can be blamed."""
        self._in_vain += 1
        if self._in_vain == VAIN:
            raise RuntimeError(
                f"grading: {VAIN} worker processes in a row ended before they began ({end}). Look "
                "for what ends them: is there memory for them, in this machine and within "
                "grading.memory_mb? grading.workers = 0 grades inside this process"
            )


class _Job:
    """One batch of samples: which wait, which are graded."""

    def __init__(
        self, samples: Sequence[Sample], *, num_workers: int, progress: Progress | None
    ) -> None:
        self._samples = samples
        self._progress = progress
        self.results: dict[int, Results] = {}
        self.tries: Counter[int] = Counter()  # workers that ended while they were at a sample
        # Rewards that took the worker down: they are asked no more about the sample.
        self.excused: defaultdict[int, dict[int, tuple[str, Score]]] = defaultdict(dict)
        size = max(1, min(CHUNK, math.ceil(len(samples) / (4 * max(1, num_workers)))))
        numbers = list(range(len(samples)))
        self.waiting = deque(numbers[start : start + size] for start in numbers[::size])

    @property
    def finished(self) -> bool:
        return len(self.results) == len(self._samples)

    def take(self) -> tuple[list[tuple[int, Sample]], set[int]]:
        """The next chunk, and the rewards that are not to be asked about it."""
        numbers = self.waiting.popleft()
        excused = set(self.excused[numbers[0]])
        return [(number, self._samples[number]) for number in numbers], excused

    def finish(self, number: int, results: Results) -> None:
        if not 0 <= number < len(self._samples):
            raise ValueError(f"a grading worker answered about sample {number}, which is none")
        self.results.setdefault(number, [*results, *self.excused[number].values()])
        if self._progress is not None:
            self._progress(len(self.results), len(self._samples))


class _Worker:
    """A worker process, its line, and what it is at."""

    def __init__(self, rewards: Sequence[BoundReward], limits: dict[str, Any]) -> None:
        self.beat = Beat()
        self.chunk: list[int] = []
        self.used = self.killed = False
        self._unread = b""
        self.hired_by = threading.current_thread()
        context = multiprocessing.get_context("fork")
        self.line, theirs = _line()
        self._process = context.Process(
            target=work,
            args=(theirs, rewards),
            kwargs={"other_end": self.line, "beat": self.beat, **limits},
            daemon=True,
        )
        try:
            with warnings.catch_warnings():  # the copy runs nothing of what other threads were at
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except OSError:
            self.line.close()
            raise
        finally:
            theirs.close()

    @property
    def idle(self) -> bool:
        return not self.chunk or self.killed

    @property
    def since(self) -> float:
        """When what it is at began."""
        return self.beat.read()[2]

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def start(self, chunk: list[tuple[int, Sample]], without: set[int]) -> None:
        self.chunk, self.used = [number for number, _ in chunk], True
        self.beat.write(NOT_BEGUN, 0, since=time.monotonic() + START)  # until it says otherwise
        self.line.send((self.chunk, without))
        self.line.send([sample for _, sample in chunk])

    def receive(self) -> list[tuple[int, Results]]:
        """What has come in; the rest of a message that is not whole is not waited for."""
        data = os.read(self.line.fileno(), 2**20)
        if not data:
            raise EOFError
        *messages, self._unread = (self._unread + data).split(b"\n")
        found: list[tuple[int, Results]] = []
        for message in map(json.loads, messages):
            for number, results in message["results"]:
                found.append((number, [(name, Score(**score)) for name, score in results]))
            if message["last"]:
                self.chunk = []
        return found

    def end(self, *, wait: bool) -> str:
        """How it died, after a moment in which it may."""
        if wait:
            self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "no answer"
        try:
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:  # a real-time signal has no name
            return f"signal {-code}"

    def kill(self) -> None:
        """End it and what it started."""
        self.killed = True
        if self._process.pid is not None and self._process.is_alive():
            for end in (os.killpg, os.kill):
                try:
                    end(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        self._process.join(5.0)
        self.line.close()


def _line() -> tuple[Connection, Connection]:
    """Two ends; at the first, sending fails where the other does not read for a while."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(None)  # some libraries set a limit for every socket
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START), 0))
    return Connection(ends[0].detach()), Connection(ends[1].detach())
