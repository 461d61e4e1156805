"""Environments in processes that can be killed, so that no episode can hold up another, or a run.

A worker hosts many episodes. Where one of them hangs or takes the memory of its worker, only that
one is broken: the worker is replaced, and the others are played again in a new one, from their
start and by the same turns. Beside one that hangs, calls that are under way have the time that they
had: those that hang too are over after one limit. A worker that dies does not say by whose fault:
the calls that were under way are tried again, each in a worker where nothing else runs.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, Literal

from posttrain.envs.episodes import CLOSING, Episodes, History
from posttrain.envs.hosting import NEVER, Answered, EnvWorker, Episode, EpisodeCall, make_job
from posttrain.envs.plain_answers import Failure, Plain, from_plain, to_plain
from posttrain.forked import check_forks, started
from posttrain.types import Prompt, Turn

TICK = 1.0  # seconds after which workers are looked at though none has said anything
LONG = 10.0  # seconds after which it is told that an answer is waited for
TRIES = 3  # workers that die while a call is under way before the call is taken to be the cause
SHUT = "environments: the pool was shut down"
MAX_FAILED_STARTS = 10  # workers in a row that die before they are ready


class EnvPool:
    """Runs an environment (or what a function makes) in ``workers`` processes, forks of this one.

    Each hosts episodes whose calls run in ``threads`` threads, coroutines in a loop; ``seconds`` is
    the limit of one call, ``memory_mb`` what a worker may take beyond what it has when it starts.
    With ``workers=0`` all runs in this process, one call at a time, without limits. ``restarts``
    counts the workers that were replaced, ``close_failures`` the episodes that could not be closed.
    ``tell`` is told, in a line, of answers that take long. Any thread may call.

    >>> from posttrain.envs import ScriptedEnv
    >>> pool = EnvPool(ScriptedEnv(replies=["so?"], score=1.0), workers=0)
    >>> episode = pool.open(Prompt(id="0", text="2+3="), seed=7)
    >>> [pool.ask(episode, Turn(tokens=(5,), text="5")).result() for _ in range(2)]
    ['so?', 1.0]
    >>> pool.shutdown()
    """

    def __init__(
        self,
        env: Any,
        *,
        workers: int = 2,
        threads: int = 16,
        seconds: float = 30.0,
        memory_mb: int = 2048,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.restarts = self.close_failures = self._failed_starts = 0
        self._env, self._num_workers, self._threads = env, workers, threads
        self._seconds, self._memory_mb = seconds, memory_mb
        self._told, self._tell, self._told_of_long = (0, 0), tell, False
        self._episodes: dict[int, Episode] = {}
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._here = Episodes(env) if workers == 0 else None
        self.methods = frozenset() if self._here is None else self._here.methods
        """Which of :data:`posttrain.envs.episodes.OPTIONAL` the environment has."""
        if self._here is None:
            check_forks("environment.workers", what="environments")
            self._workers: list[EnvWorker] = []
            self._apart: list[EnvWorker] = []  # where suspects are tried alone
            self._leaving: list[EnvWorker] = []  # where one hangs, until the others are done
            self._inbox: SimpleQueue[EpisodeCall] = SimpleQueue()
            self._waiting: deque[EpisodeCall] = deque()
            self._ears, self._mouth = os.pipe()
            self._ready, self._stopping = threading.Event(), False
            # Workers die with the thread that forked them: one that lives as long as the pool.
            self._thread = threading.Thread(target=self._serve, name="environments", daemon=True)
            self._thread.start()
            atexit.register(self.shutdown)
            self._ready.wait()
            self._check()

    def open(self, prompt: Prompt, *, seed: int, history: History = ()) -> int:
        """A new episode, by a number; ``history`` is what was said in it before."""
        number = next(self._numbers)
        self._episodes[number] = Episode(number, prompt, seed, list(history))
        return number

    def opening(self, episode: int) -> Answered:
        """What the environment says before the first turn; None where nothing."""
        return self._ask(EpisodeCall(self._episodes[episode], "opening"))

    def ask(self, episode: int, turn: Turn) -> Answered:
        """The environment's answer to the policy's turn, or how it failed; it never raises."""
        return self._ask(EpisodeCall(self._episodes[episode], "reply", turn))

    def about(self, episode: int, kind: Literal["score", "counts"]) -> Answered:
        """What an episode is worth as it stands, or what there was to count in it, as parts."""
        return self._ask(EpisodeCall(self._episodes[episode], kind))

    def close(self, episode: int) -> None:
        """The episode is over, however it ended; nothing waits for what closing it takes."""
        found = self._episodes.pop(episode)
        found.closed = True
        if self._failure is None:
            self._ask(EpisodeCall(found, "close"))

    def news(self) -> tuple[int, int]:
        """Restarts and failures to close since this was asked last: closing ends when it ends."""
        found = self.restarts, self.close_failures
        before, self._told = self._told, found
        return found[0] - before[0], found[1] - before[1]

    def shutdown(self) -> None:
        """End the workers, once the episodes that were closed are."""
        if self._here is not None:
            self._failure = self._failure or RuntimeError(SHUT)
            self._here.stop()
            return
        atexit.unregister(self.shutdown)
        if self._stopping:
            return
        self._until, self._stopping = time.monotonic() + CLOSING, True
        self._wake()
        self._thread.join()
        os.close(self._ears)
        os.close(self._mouth)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _ask(self, call: EpisodeCall) -> Answered:
        self._check()
        if self._here is None:
            self._inbox.put(call)
            self._wake()
            if self._failure is not None and not call.future.done():  # it ended meanwhile
                call.future.set_exception(self._failure)
            return call.future

        self._here.submit(make_job(call, 0), lambda answer, stuck: self._answered(call, answer))
        return call.future

    def _wake(self) -> None:
        os.write(self._mouth, b".")

    # ------------------------------------------------------------- in the thread of the pool

    def _serve(self) -> None:
        try:
            self._workers = [self._start() for _ in range(self._num_workers)]
            while not self._stopping or (self._closing() and time.monotonic() < self._until):
                self._hand_out()
                self._listen()
                self._end_late()
                self._tell_of_long()
        except BaseException as problem:  # noqa: BLE001 - raised where an answer is waited for
            self._failure = problem
        finally:
            for worker in self._all():
                worker.kill()
            self._failure = self._failure or RuntimeError(SHUT)
            under_way = [call for w in self._all() for call in w.calls.values()]
            for call in [*under_way, *self._waiting, *_drained(self._inbox)]:
                if not call.future.done():
                    call.future.set_exception(self._failure)
            self._ready.set()

    def _all(self) -> list[EnvWorker]:
        return [*self._workers, *self._apart, *self._leaving]

    def _closing(self) -> bool:
        """Whether episodes are still being closed, though nobody waits for it."""
        self._waiting.extend(_drained(self._inbox))
        under_way = [call for worker in self._all() for call in worker.calls.values()]
        return any(call.kind == "close" for call in [*under_way, *self._waiting])

    def _start(self) -> EnvWorker:
        return started(
            lambda: EnvWorker(self._env, threads=self._threads, memory_mb=self._memory_mb),
            what="environments",
            option="environment.workers",
        )

    def _hand_out(self) -> None:
        self._waiting.extend(_drained(self._inbox))
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            episode = call.episode
            gone = episode.worker is None if call.kind == "close" else episode.closed
            if gone:
                call.future.cancel()  # nobody reads it, or nothing is left to close
                continue
            worker = None if episode.busy else self._host(call)
            if worker is None:
                self._waiting.append(call)
                continue
            try:
                worker.start(call, self._seconds)
            except OSError:  # it has died, or does not read its pipe
                self._replace(worker)
            except Exception as error:  # noqa: BLE001 - a prompt of what cannot be pickled
                worker.finish(max(worker.calls), left=True)
                reason = f"prompt cannot be sent to a worker ({error}); set environment.workers = 0"
                call.finish(Failure(kind="raised", reason=f"was not asked: its {reason}"))
        hosts = {call.episode.worker for call in self._waiting if call.kind == "close"}
        for worker in [each for each in self._leaving if not each.calls and each not in hosts]:
            self._leaving.remove(worker)
            worker.kill()

    def _host(self, call: EpisodeCall) -> EnvWorker | None:
        """The worker that can take a call now."""
        if call.alone and call.kind != "close":
            free = next((worker for worker in self._apart if not worker.calls), None)
            if free is None and len(self._apart) < self._num_workers:
                self._apart.append(self._start())
            return free if free is not None and free.ready else None
        able = [call.episode.worker] if call.episode.worker is not None else self._workers
        able = [each for each in able if each.ready and len(each.calls) < self._threads]
        return min(able, key=lambda each: (len(each.calls), each.hosted), default=None)

    def _listen(self) -> None:
        workers = self._all()
        lines: dict[Any, EnvWorker] = {worker.line: worker for worker in workers}
        soonest = min((worker.due for worker in workers), default=0.0) - time.monotonic()
        for line in wait([*lines, self._ears], timeout=max(0.0, min(soonest, TICK))):
            if line == self._ears:
                os.read(self._ears, 2**16)
                continue
            worker = lines[line]
            try:
                messages = list(worker.receive())
            except (EOFError, OSError, ValueError):  # it has died, or sent what is no message
                self._replace(worker)
                continue
            for message in messages:
                if worker.killed:
                    break  # by what an earlier message said: the calls of the others are asked anew
                try:
                    self._hear(worker, message)
                except (KeyError, TypeError):  # no message of ours
                    self._replace(worker)

    def _hear(self, worker: EnvWorker, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise RuntimeError(
                f"task.env: the environment {message['refused']} as a worker made it\n"
                f"{message['details']}"
            )
        if "methods" in message:
            worker.ready, self.methods = True, frozenset(message["methods"])
            worker.due, self._failed_starts = NEVER, 0
            self._ready.set()
            return
        call, answer = worker.calls[message["number"]], from_plain(message["answer"])
        if isinstance(answer, Failure) and answer.kind == "memory":
            # Whoever took it, another call may have been the one that found none left.
            self._replace(worker, guilty=call if worker in self._apart else None, why=answer)
        elif isinstance(answer, Failure) and message["stuck"] and worker in self._apart:
            self._replace(worker, guilty=call, why=answer)
        else:
            worker.finish(message["number"], left=message["stuck"])
            if message["stuck"] and worker in self._workers:
                self._let_leave(worker)
            elif worker not in self._workers and call.kind != "close" and not message["stuck"]:
                # Nothing stays where suspects are tried or one hangs: it goes on in another worker.
                self._waiting.appendleft(EpisodeCall(call.episode, "close"))
            self._answered(call, message["answer"])

    def _let_leave(self, worker: EnvWorker) -> None:
        """Replace a worker in which a call hangs; those under way may end in it, none is new."""
        self.restarts += 1
        self._workers[self._workers.index(worker)] = self._start()
        self._leaving.append(worker)
        for episode in [each for each in worker.episodes if not each.busy]:
            worker.episodes.remove(episode)
            episode.worker = None

    def _answered(self, call: EpisodeCall, answer: Plain) -> None:
        if call.kind == "close":
            self.close_failures += "failure" in answer
        if call.kind in ("opening", "reply"):
            call.episode.log.append((call.turn, answer))
        call.finish(from_plain(answer))

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in self._all():
            ended = worker.ended  # read before its pipe: what has ended sends nothing more
            if wait([worker.line], timeout=0):
                continue
            calls = list(worker.calls.values())
            if ended:
                self._replace(worker)  # a process that it started keeps its pipe open
            elif now > worker.due:
                # It cannot even say that a call is late: any of them may be what holds it up.
                reason = f"gave no answer within {self._seconds:g} s and held up its worker"
                late = Failure(kind="timeout", reason=reason)
                self._replace(worker, guilty=calls[0] if len(calls) == 1 else None, why=late)

    def _tell_of_long(self) -> None:
        """One line where answers have taken long, and no other until all of those are there."""
        now = time.monotonic()
        calls = [call for worker in self._all() for call in worker.calls.values()]
        long = [call for call in calls if call.kind != "close" and now - call.begun > LONG]
        if long and not self._told_of_long:
            first = min(long, key=lambda call: call.begun)
            self._tell(
                f"environments: {len(long)} answer{'s' * (len(long) > 1)} waited for, the "
                f"{first.kind} to prompt {first.episode.prompt.id!r} for {now - first.begun:.0f} s;"
                f" environment.seconds = {self._seconds:g} is the limit of each"
            )
        self._told_of_long = bool(long)

    def _replace(
        self, worker: EnvWorker, *, guilty: EpisodeCall | None = None, why: Failure | None = None
    ) -> None:
        """Replace a worker; of the calls under way the guilty one is broken, others asked anew."""
        end = worker.end(wait=why is None)
        worker.kill()
        self.restarts += worker not in self._leaving
        if not worker.ready:
            self._count_failed_start(end)
        if worker in self._workers:
            self._workers[self._workers.index(worker)] = self._start()
        else:
            (self._apart if worker in self._apart else self._leaving).remove(worker)
        for episode in worker.episodes:
            episode.worker, episode.busy = None, False
        calls = list(worker.calls.values())
        # Of those that came late the oldest is likely the cause: it is tried again last.
        late = why is not None and why.kind == "timeout"
        for call in calls if late else reversed(calls):
            if call is guilty or call.kind == "close":  # the state that was to be closed is gone
                ended = why or Failure(kind="crashed", reason=f"ended its worker process ({end})")
                self._answered(call, to_plain(ended))
                continue
            if guilty is None:
                call.deaths, call.alone = call.deaths + 1, True
            if guilty is None and len(calls) == 1 and call.deaths >= TRIES:
                reason = f"ended its worker process ({end}), {call.deaths} times"
                call.finish(Failure(kind="crashed", reason=reason))
            else:
                self._waiting.appendleft(call)

    def _count_failed_start(self, end: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == MAX_FAILED_STARTS:
            raise RuntimeError(
                f"environments: {MAX_FAILED_STARTS} worker processes in a row ended before they "
                f"began ({end}). Look for what ends them: is there memory for them, here "
                "and within environment.memory_mb? environment.workers = 0 does without"
            )


def _drained(inbox: SimpleQueue[EpisodeCall]) -> list[EpisodeCall]:
    return [inbox.get() for _ in range(inbox.qsize())]
