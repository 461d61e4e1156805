"""Several jobs in threads, one at a time, until all of them ask something: then all are answered.

Each job is written as if it were alone. It runs until it asks something, or ends; then the next one
does. Once none can go on, what they asked is answered in one call. So code that is not made for
threads may be used by all of them, and the order of events is always the same.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
PATIENCE = 5.0  # seconds for a job to notice that all are to end


class Turns(Generic[Question, Answer]):
    """Lets jobs take turns: ``answer`` gives what each gets, by number, or what it raises.

    ``before`` is called in the thread of a job whenever it goes on.

    >>> turns = Turns(lambda asked: {n: sum(asked.values()) for n in asked})
    >>> turns.run([lambda: turns.ask(0, 1), lambda: turns.ask(1, 2)])
    [3, 3]
    """

    def __init__(
        self,
        answer: Callable[[Mapping[int, Question]], Mapping[int, Answer | Exception]],
        *,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._answer, self._before = answer, before
        self._changed = threading.Condition()
        self._ready: list[int] = []
        self._asked: dict[int, Question] = {}
        self._answers: dict[int, Answer | BaseException] = {}
        self._running: int | None = None
        self._over = False

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result | BaseException]:
        """Run all jobs to their end: what each returned, or raised. Call it in the main thread."""
        ended: dict[int, Result | BaseException] = {}

        def work(number: int, job: Callable[[], Result]) -> None:
            try:
                self._wait(number)
                ended[number] = job()
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                ended[number] = error
            finally:
                self._hand_on()

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(work, number, job), daemon=True
            )
            for number, job in enumerate(jobs)
        ]
        self._ready = list(range(len(jobs)))
        for thread in threads:
            thread.start()
        try:
            self._hand_on()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # not for ever: a signal is taken in between
        except BaseException:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for thread in threads:
                thread.join(PATIENCE)
            raise
        return [ended[number] for number in range(len(jobs))]

    def ask(self, number: int, question: Question) -> Answer:
        """Ask from within job ``number``; answered when all that have not ended have asked."""
        self._asked[number] = question
        self._hand_on()
        self._wait(number)
        answer = self._answers.pop(number)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _hand_on(self) -> None:
        """Let the next one run; the last that could has all questions answered before."""
        if not self._ready and self._asked and not self._over:
            asked, self._asked = self._asked, {}
            try:
                self._answers = dict(self._answer(asked))
            except BaseException as error:  # noqa: BLE001 - each job raises it
                self._answers = dict.fromkeys(asked, error)
            self._ready = sorted(asked)
        with self._changed:
            self._running = self._ready.pop(0) if self._ready else None
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._running == number)
        if self._over:
            raise RuntimeError("another part of this run has ended it")
        self._before(number)
