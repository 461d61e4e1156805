"""Many calls of one environment in one process: in which order they run, and what wakes it."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from posttrain.envs.env_pool import EnvPool
from posttrain.envs.episodes import EnvJob, Episodes
from posttrain.types import Prompt, Turn

PROMPT = Prompt(id="0", text="?")


class Gate:
    """Counts its replies; the first one waits to be let through."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.said: list[str] = []

    def start(self, prompt: Prompt) -> None:
        """No state."""

    def reply(self, state: None, turn: Turn) -> str:
        self.entered.set()
        assert self.opened.wait(60)
        self.said.append(turn.text)
        return f"{turn.text}!"


@contextlib.contextmanager
def hosted(env: Any) -> Iterator[Episodes]:
    episodes = Episodes(env)
    try:
        yield episodes
    finally:
        episodes.stop()


def job(number: int) -> EnvJob:
    turn = Turn(tokens=(5,), text=str(number))
    return EnvJob(number=number, kind="reply", episode=number, prompt=PROMPT, seed=0, turn=turn)


def test_calls_that_come_together_wake_the_environment_once_and_run_in_their_order() -> None:
    env, answers, wakes = Gate(), queue.SimpleQueue[Any](), []
    with hosted(env) as episodes:
        wake = episodes._loop.call_soon_threadsafe

        def counted(*given: Any, **more: Any) -> Any:
            wakes.append(given)
            return wake(*given, **more)

        episodes._loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        episodes.submit(job(0), lambda answer, stuck: answers.put(answer))
        assert env.entered.wait(60)
        for number in range(1, 100):
            episodes.submit(job(number), lambda answer, stuck: answers.put(answer))
        env.opened.set()
        found = [answers.get(timeout=60)["text"] for _ in range(100)]
        assert len(wakes) == 2  # by the first, and once by all that came while it ran
    assert env.said == [str(number) for number in range(100)]
    assert found == [f"{number}!" for number in range(100)]


def test_calls_of_several_threads_are_all_answered() -> None:
    """None is lost between the last look at what waits and the next wake-up."""
    env = Gate()
    env.opened.set()
    pool = EnvPool(env, workers=0)
    found: list[Any] = []

    def ask(first: int) -> None:
        for number in range(first, first + 300):
            turn = Turn(tokens=(5,), text=str(number))
            found.append(pool.ask(pool.open(PROMPT, seed=0), turn).result(timeout=60))

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 300, 600)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.shutdown()
    assert sorted(found) == sorted(f"{number}!" for number in range(900))


def test_every_call_after_the_end_is_refused() -> None:
    """Not the first alone: who waits for an answer would wait for ever."""
    with hosted(Gate()) as episodes:
        pass
    for number in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            episodes.submit(job(number), lambda answer, stuck: None)


def test_a_call_answered_before_its_wake_up_returns_does_not_hold_up_the_next() -> None:
    env, answered = Gate(), threading.Event()
    env.opened.set()
    with hosted(env) as episodes:
        wake = episodes._loop.call_soon_threadsafe

        def slow(*given: Any, **more: Any) -> Any:
            handle = wake(*given, **more)
            assert answered.wait(60)
            return handle

        with patch.object(episodes._loop, "call_soon_threadsafe", slow):
            for number in range(2):
                answered.clear()
                episodes.submit(job(number), lambda answer, stuck: answered.set())
                assert answered.wait(20)
