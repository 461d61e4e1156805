"""The grading pool: rewards in processes that can be killed, so that none can hold up a run.

A sample that takes too long, or whose worker dies again and again, is the only one that gets a
broken score: the worker is replaced, and other workers grade the rest of its chunk. A worker may
also die through no fault of the sample it is grading (the system was short of memory, a thread that
an earlier sample left behind crashed), or while it waits for work: its samples are handed out
again. (pebble's process pool stops for good when a waiting worker is killed.)
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from posttrain.forked import START, Forked, check_forks, started
from posttrain.rewards.bound import BoundReward
from posttrain.rewards.grading import WHOLE_CHUNK, Results, Sample
from posttrain.rewards.pool_worker import NOT_BEGUN, Status, work
from posttrain.types import Score

CHUNK = 64  # samples that a worker gets at a time, at most
SLACK = 0.05  # seconds that are added to a time limit before it is checked
TRIES = 3  # workers that die while grading a sample before the sample is taken to be the cause
MAX_FAILED_STARTS = 10  # workers in a row that die before they grade anything
Progress = Callable[[int, int], None]


class GradingPool:
    """A :class:`posttrain.rewards.scorer.Grader` that runs rewards in worker processes.

    ``seconds`` is the limit of one sample (of one call, for a reward that takes whole batches),
    ``memory_mb`` the memory a worker may take beyond what it has when it starts. Workers are forks
    of this process: a reward may be any function, but changes it makes to variables stay in its
    worker. ``progress`` is called with the number of graded samples; ``died`` counts the workers
    that died by themselves and were replaced. Not thread-safe.
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
        check_forks("grading.workers", what="rewards")
        self._rewards = tuple(rewards)
        self._limits = {"seconds": seconds, "memory_mb": memory_mb}
        self._seconds = seconds
        self._progress = progress
        self.died = self._failed_starts = 0
        self._workers = [self._start_worker() for _ in range(workers)]
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
                self._replace_late(job)
        except BaseException:  # after an interrupt, late answers of the workers belong to no job
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

    def _start_worker(self) -> _Worker:
        return started(
            lambda: _Worker(self._rewards, self._limits), what="grading", option="grading.workers"
        )

    def _restart(self, worker: _Worker) -> _Worker:
        """Kill a worker and start a new one in its place."""
        worker.kill()
        new = self._workers[self._workers.index(worker)] = self._start_worker()
        return new

    def _hand_out(self, job: _Job) -> None:
        while job.waiting:
            idle = [worker for worker in self._workers if worker.idle]
            if not idle:
                return
            # Prefer an unused worker: the first chunk in the queue may hold a sample that killed a
            # worker, and is retried where no earlier sample can have left anything behind.
            worker = min(idle, key=lambda worker: worker.used)
            # Linux kills a worker when the thread that forked it ends (PR_SET_PDEATHSIG).
            expected = worker.killed or not worker.parent_thread.is_alive()
            if worker.ended or expected:
                self.died += not expected
                worker = self._restart(worker)
            try:
                worker.start(*job.take())
            except OSError:  # the worker has died, or does not read its pipe
                self._replace(worker, job)

    def _listen(self, job: _Job) -> None:
        busy = {worker.line: worker for worker in self._workers if not worker.idle}
        until = min((w.since + self._allowed(w) for w in busy.values()), default=0.0)
        patience = max(0.0, until - time.monotonic()) + SLACK
        for line in wait(list(busy), timeout=min(patience, 1.0)):
            worker = busy[line]  # type: ignore[index]
            try:
                found = worker.receive()
            except (EOFError, OSError, ValueError, KeyError, TypeError):
                # The worker died, or sent no valid message.
                self._replace(worker, job)
                continue
            self._failed_starts = 0
            for number, results in found:
                job.finish(number, results)

    def _replace_late(self, job: _Job) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if not worker.idle]:
            ended = worker.ended  # read before its pipe: a worker that has ended sends nothing more
            if wait([worker.line], timeout=0):
                continue  # its answer is there and counts, even if this process is late to read it
            if ended:
                self._replace(worker, job)  # a process that it started keeps its pipe open
            elif now - worker.since > self._allowed(worker):
                self._replace(worker, job, late=True)

    def _allowed(self, worker: _Worker) -> float:
        """The time limit of the reward that a worker runs: the pool's, or its own if longer."""
        return max(self._seconds, self._rewards[worker.status.read()[1]].longest_call)

    def _replace(self, worker: _Worker, job: _Job, *, late: bool = False) -> None:
        """Replace a worker that died or hangs; only the sample that caused it is broken."""
        end = worker.end(wait=not late)
        self.died += not late
        self._restart(worker)  # kill it before its status is read: a live worker may change it
        sample, reward, since = worker.status.read()
        if sample == NOT_BEGUN:
            self._count_failed_start(end)
            job.waiting.appendleft(worker.chunk)
            return
        left = [number for number in worker.chunk if number not in job.results]
        suspect = left[0] if len(left) == 1 else None
        if sample != WHOLE_CHUNK and worker.chunk[sample] in left:
            suspect = worker.chunk[sample]
        if late and time.monotonic() - since <= self._allowed(worker):
            suspect = None  # it had finished the late sample just in time, and was grading the next
        if suspect is not None:
            job.tries[suspect] += 1
        if suspect is not None and (late or job.tries[suspect] == TRIES):
            name = self._rewards[reward].name
            reason = f"reward {name!r} ended its worker process ({end}), {TRIES} times"
            if late:
                reason = f"reward {name!r} gave no answer within {self._allowed(worker):g} s"
            score = Score(value=0.0, state="timeout" if late else "crashed", reason=reason)
            job.barred[suspect][reward] = (name, score)
            del job.tries[suspect]  # each reward has its own number of tries on a sample
            others = len(job.barred[suspect]) < len(self._rewards)
            # A broken monitored reward does not decide: the other rewards still grade the sample.
            if not self._rewards[reward].monitored or not others:
                job.finish(suspect, [])
        again = [number for number in left if number not in job.results]
        # One sample a chunk: if the next worker dies, the cause is known.
        again.sort(key=lambda number: number != suspect)
        job.waiting.extendleft([number] for number in reversed(again))

    def _count_failed_start(self, end: str) -> None:
        """Count a worker that died before it graded anything: no sample can be the cause."""
        self._failed_starts += 1
        if self._failed_starts == MAX_FAILED_STARTS:
            raise RuntimeError(
                f"grading: {MAX_FAILED_STARTS} worker processes in a row ended before they began "
                f"({end}). Look for what ends them: is there memory for them, in this machine and "
                "within grading.memory_mb? grading.workers = 0 grades inside this process"
            )


class _Job:
    """One batch of samples: those waiting to be graded, and the results of the others."""

    def __init__(
        self, samples: Sequence[Sample], *, num_workers: int, progress: Progress | None
    ) -> None:
        self._samples = samples
        self._progress = progress
        self.results: dict[int, Results] = {}
        self.tries: Counter[int] = Counter()  # by sample: how many workers died while grading it
        # By sample: the rewards that killed a worker on it. They do not grade it again.
        self.barred: defaultdict[int, dict[int, tuple[str, Score]]] = defaultdict(dict)
        size = max(1, min(CHUNK, math.ceil(len(samples) / (4 * max(1, num_workers)))))
        numbers = list(range(len(samples)))
        self.waiting = deque(numbers[start : start + size] for start in numbers[::size])

    @property
    def finished(self) -> bool:
        return len(self.results) == len(self._samples)

    def take(self) -> tuple[list[tuple[int, Sample]], set[int]]:
        """The next chunk, and the rewards that must not grade it."""
        numbers = self.waiting.popleft()
        barred = set(self.barred[numbers[0]])
        return [(number, self._samples[number]) for number in numbers], barred

    def finish(self, number: int, results: Results) -> None:
        if not 0 <= number < len(self._samples):
            raise ValueError(f"a grading worker answered about sample {number}, which is none")
        self.results.setdefault(number, [*results, *self.barred[number].values()])
        if self._progress is not None:
            self._progress(len(self.results), len(self._samples))


class _Worker(Forked):
    """A worker process, the pipe to it, and the chunk it is grading."""

    def __init__(self, rewards: Sequence[BoundReward], limits: dict[str, Any]) -> None:
        self.status = Status()
        self.chunk: list[int] = []
        self.used = False
        self._unread = b""
        super().__init__(work, rewards, status=self.status, **limits)

    @property
    def idle(self) -> bool:
        return not self.chunk or self.killed

    @property
    def since(self) -> float:
        """When the current call of a reward began."""
        return self.status.read()[2]

    def start(self, chunk: list[tuple[int, Sample]], without: set[int]) -> None:
        self.chunk, self.used = [number for number, _ in chunk], True
        # The status until the worker writes its own.
        self.status.write(NOT_BEGUN, 0, since=time.monotonic() + START)
        self.line.send((self.chunk, without))
        self.line.send([sample for _, sample in chunk])

    def receive(self) -> list[tuple[int, Results]]:
        """The results that have arrived; an incomplete message is kept for the next call."""
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
