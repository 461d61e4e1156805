"""Many episodes of one environment at once, in one process: threads for its methods, or a loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.envs.plain_answers import Failure, Plain, failed, to_plain
from posttrain.envs.tool_turns import THREADS
from posttrain.types import Prompt, Score, Turn

OPTIONAL = ("opening", "score", "counts")  # methods of an environment that it need not have
CLOSING = 5.0  # seconds that episodes may take to close once all is over
Done = Callable[[Plain, bool], None]
"""Called with an answer, and whether a thread still hangs in the method that gave none."""
Kind = Literal["opening", "reply", "score", "counts", "close"]
History = Sequence[tuple[Turn | None, Plain]]
"""Turns of the policy, each with its answer; None in the place of a turn asks for the opening."""


@dataclass(frozen=True, kw_only=True)
class EnvJob:
    """One call of an environment; where the episode is not known here, it is played up to it.

    ``limit`` are the seconds that a method may take, 0: any.
    """

    number: int
    kind: Kind
    episode: int
    prompt: Prompt
    seed: int
    history: History = ()
    turn: Turn | None = None
    limit: float = 0.0


class Episodes:
    """The states of an environment's episodes, and an event loop that runs their calls.

    Coroutines run in the loop; other methods in ``threads`` threads, or, with 0, in the loop's own,
    one at a time. ``env`` is an environment, or a function that makes one.
    """

    def __init__(self, env: Any, *, threads: int = 0) -> None:
        made = isinstance(env, type) or not hasattr(env, "reply")
        self.env = env() if made else env
        found = [name for name in OPTIONAL if callable(getattr(self.env, name, None))]
        self.methods = frozenset(found)
        self._seeded = _takes_seed(self.env.start)
        self._states: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(threads) if threads else None
        self._jobs: deque[tuple[EnvJob, Done]] = deque()  # not begun yet
        self._tasks: set[asyncio.Task[None]] = set()  # under way: a loop itself forgets them
        self._woken = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="envs", daemon=True)
        self._thread.start()

    def submit(self, job: EnvJob, done: Done) -> None:
        """Run a job; ``done`` is called by the loop. Jobs that come together wake it once."""
        self._jobs.append((job, done))
        if not self._woken:
            self._woken = True  # before the call: the loop may begin, and unset it, within it
            try:
                self._loop.call_soon_threadsafe(self._begin)
            except RuntimeError:  # the loop is closed: the next job is to hear so too
                self._woken = False
                raise

    def _begin(self) -> None:
        self._woken = False  # before the first is taken: one that comes now is taken, or wakes
        while self._jobs:
            task = self._loop.create_task(self._run(*self._jobs.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """End the loop; what runs in it has a few seconds to end."""
        try:
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result(CLOSING + 1)
        except TimeoutError:  # a method holds up the loop: its thread ends with the process
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _drain(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, left = await asyncio.wait(others, timeout=CLOSING)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _run(self, job: EnvJob, done: Done) -> None:
        stuck = False
        try:
            answer = await self._answer(job)
        except _Late as late:
            stuck = late.stuck
            reason = f"gave no answer within {job.limit:g} s"
            answer = to_plain(Failure(kind="timeout", reason=reason))
        except BaseException as error:  # noqa: BLE001 - sys.exit of an environment, say
            answer = to_plain(failed(error, inside=__file__))
        done(answer, stuck)

    async def _answer(self, job: EnvJob) -> Plain:
        if job.kind == "close":
            await self._close(job)
            return to_plain(None)
        if job.episode not in self._states:
            given = {"seed": job.seed} if self._seeded else {}
            self._states[job.episode] = await self._call(job, self.env.start, job.prompt, **given)
            for number, (turn, known) in enumerate(job.history):
                if await self._asked(job, turn) != known:
                    reason = f"answered the same turns differently when replayed (reply {number})"
                    return to_plain(Failure(kind="changed", reason=reason))
        if job.kind in ("score", "counts"):
            return await self._finally(job)
        return await self._asked(job, job.turn)

    async def _asked(self, job: EnvJob, turn: Turn | None) -> Plain:
        state = self._states[job.episode]
        if turn is not None:
            return to_plain(await self._call(job, self.env.reply, state, turn))
        return to_plain(await self._call(job, self.env.opening, state) or None)

    async def _finally(self, job: EnvJob) -> Plain:
        """What an episode is worth as it stands; or what there was to count, as parts."""
        state = self._states[job.episode]
        if job.kind == "score":
            return to_plain(await self._call(job, self.env.score, state))
        counts = await self._call(job, self.env.counts, state)
        return to_plain(Score(value=0.0, parts=dict(counts)))

    async def _close(self, job: EnvJob) -> None:
        closes = getattr(self.env, "close", None)
        if job.episode in self._states:
            state = self._states.pop(job.episode)
            if callable(closes):
                await self._call(job, closes, state)

    async def _call(
        self, job: EnvJob, function: Callable[..., Any], *given: Any, **more: Any
    ) -> Any:
        """What a method returns; it may take the job's limit."""
        running: list[Future[Any]] = []

        def submit(function: Callable[..., Any], /, *given: Any, **more: Any) -> Future[Any]:
            assert self._threads is not None, "asked for only where there are threads"
            running.append(self._threads.submit(function, *given, **more))
            return running[-1]

        THREADS.set(None if self._threads is None else submit)
        try:
            async with asyncio.timeout(job.limit or None) as clock:
                if self._threads is None or inspect.iscoroutinefunction(function):
                    result = function(*given, **more)
                else:
                    result = await asyncio.wrap_future(submit(function, *given, **more))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError:
            if clock.expired():
                raise _Late(stuck=not all(each.done() for each in running)) from None
            raise


class _Late(Exception):  # noqa: N818 - named after what is wrong
    """A call took too long; ``stuck`` says that it cannot be ended, short of its process."""

    def __init__(self, *, stuck: bool) -> None:
        super().__init__()
        self.stuck = stuck


def _takes_seed(start: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(start).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == "seed" or each.kind == each.VAR_KEYWORD for each in parameters)
