"""Rollouts ahead of learning: exact ages, whatever is slow; errors in their place; no thread left.

The engine here is told by its version alone which weights it has, as a scripted engine is.
"""

import itertools
import json
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import pytest

from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.rollout.run_ahead import RunAhead
from posttrain.rollout.waiting import from_plain, to_plain
from posttrain.track.encoding import encode_json
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
    assert "rollouts" not in {thread.name for thread in threading.enumerate()}


class SlowEngine(ScriptedEngine):
    """Takes its time, and notices when its version changes while it samples."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(lambda prompt, sample: f"{prompt.text}{sample}")
        self.delay = delay
        self.began: list[int] = []
        self.changed = False

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[list[Rollout]]:
        self.began.append(self.version)
        time.sleep(self.delay())
        found = super().generate(prompts, sampling, num_samples=num_samples, seed=seed)
        self.changed |= self.version != self.began[-1]
        return found


class Equal:
    """Scores everything alike."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.delay = delay

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        time.sleep(self.delay())
        return [Score(value=1.0) for _ in rollouts]


def source(engine: ScriptedEngine, scorer: Equal, *, max_resamples: int = 0) -> RolloutSource:
    return RolloutSource(
        engine,
        scorer,
        prompts=PromptCycle([Prompt(id=str(n), text=f"{n} ") for n in range(7)], seed=3),
        sampling=Sampling(),
        prompts_per_step=3,
        group_size=2,
        seed=3,
        max_resamples=max_resamples,
    )


def ids(collected: Collected) -> list[str]:
    return [rollout.prompt.id for rollout in collected.rollouts]


def versions(collected: Collected) -> set[int]:
    return {rollout.version for rollout in collected.rollouts}


@pytest.mark.parametrize("max_lag", [1, 2, 3])
@pytest.mark.parametrize("slow", ["learner", "engine", "scorer", "changing"])
def test_every_batch_has_its_place_and_its_age(max_lag: int, slow: str) -> None:
    """Batch k comes from version max(0, k − max_lag), whoever is slow; and it is batch k."""
    draws = random.Random(f"{max_lag}{slow}")

    def delay(who: str) -> Callable[[], float]:
        if slow == "changing":
            return lambda: draws.choice((0.0, 0.01))
        return lambda: 0.01 if slow == who else 0.0

    engine = SlowEngine(delay("engine"))
    made = source(engine, Equal(delay("scorer")), max_resamples=1)
    expected = [ids(batch) for batch in source(SlowEngine(), Equal(), max_resamples=1).steps(8)]
    learner, version, found = delay("learner"), 0, []
    with RunAhead(made.steps(8), SharedWeights(engine), max_lag=max_lag) as ahead:
        for number, batch in enumerate(ahead):
            assert versions(batch) == {max(0, number - max_lag)}
            found.append(ids(batch))
            time.sleep(learner())
            version += 1
            ahead.sync(version)
            assert engine.version == version
    assert found == expected
    assert not engine.changed


def test_the_next_batch_is_made_while_this_one_is_learned() -> None:
    """The engine begins batch 1 before the learner has asked for it, and batch 2 only after."""
    engine = SlowEngine()
    with RunAhead(source(engine, Equal()).steps(9), SharedWeights(engine), max_lag=1) as ahead:
        next(ahead)
        while len(engine.began) < 2:  # or for ever: the runner's time limit says so
            time.sleep(0.001)
        time.sleep(0.05)
        assert engine.began == [0, 0]
        ahead.sync(1)
        next(ahead)
        next(ahead)
        assert engine.began == [0, 0, 1]


def test_where_it_goes_on_travels_with_a_batch() -> None:
    """However far the source has run, a batch says how many prompts and calls lie behind it."""
    engine = SlowEngine()
    made = source(engine, Equal())
    with RunAhead(made.steps(9), SharedWeights(engine), max_lag=2) as ahead:
        first = next(ahead)
        with ahead.idle():
            assert (made.prompts.position, made.num_calls) == (9, 3)
    assert (first.position, first.num_calls) == (3, 1)
    again = source(SlowEngine(), Equal())
    again.prompts.position, again.num_calls = first.position, first.num_calls
    whole = list(source(SlowEngine(), Equal()).steps(2))
    assert ids(next(again.steps(1))) == ids(whole[1])


@pytest.mark.parametrize("max_lag", [1, 2])
@pytest.mark.parametrize("rested", [False, True])
@pytest.mark.parametrize("done", [1, 4, 8])
def test_a_queue_goes_on_from_what_was_waiting(max_lag: int, rested: bool, done: int) -> None:
    """Through JSON: the batches that follow are those of a queue that was never left."""
    prompts = [Prompt(id=str(n), text=f"{n}:", tokens=(n,)) for n in range(7)]

    def learned(made: RolloutSource, ahead: RunAhead, *, first: int, last: int) -> list[object]:
        found = []
        for version, batch in enumerate(itertools.islice(ahead, last - first), start=first + 1):
            found.append((ids(batch), [r.turns for r in batch.rollouts], batch.position))
            ahead.sync(version)
        return found

    def begun(engine: ScriptedEngine) -> RolloutSource:
        made = source(engine, Equal())
        made.prompts._prompts = prompts
        return made

    engine = SlowEngine()
    made = begun(engine)
    with RunAhead(made.steps(9), SharedWeights(engine), max_lag=max_lag) as ahead:
        learned(made, ahead, first=0, last=done)
        if rested:
            with ahead.idle():
                pass
        kept = json.loads(encode_json(to_plain(ahead.waiting(), prompts)))
        expected = learned(made, ahead, first=done, last=9)
    again = SlowEngine()
    sync = SharedWeights(again)
    sync(done)
    waiting = from_plain(kept, prompts)
    made = begun(again)
    if waiting:
        made.prompts.position, made.num_calls = waiting[-1].position, waiting[-1].num_calls
    rest = made.steps(9 - done - len(waiting))
    with RunAhead(rest, sync, max_lag=max_lag, waiting=waiting) as ahead:
        assert learned(made, ahead, first=done, last=9) == expected
        assert next(ahead, None) is None


def test_what_waits_keeps_its_greedy_answers() -> None:
    """To JSON and back, to the last bit, also one whose grader broke; a group shares one."""

    class Broken(Equal):
        def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
            broken = Score(value=0.0, state="crashed", reason="no grader", parts={"a": 1 / 3})
            return [Score(value=0.1, parts={"a": 0.1}), broken] * (len(rollouts) // 2) + [
                broken
            ] * (len(rollouts) % 2)

    made = RolloutSource(
        SlowEngine(),
        Broken(),
        prompts=PromptCycle(prompts := [Prompt(id=str(n), text=f"{n} ") for n in range(7)], seed=3),
        sampling=Sampling(),
        prompts_per_step=3,
        group_size=2,
        seed=3,
        greedy=True,
    )
    batches = list(made.steps(2))
    kept = json.loads(encode_json(to_plain(batches, prompts)))
    assert [len(batch["greedy"]) for batch in kept["batches"]] == [3, 3]
    assert from_plain(kept, prompts) == batches
    assert {r.greedy.score.ok for b in batches for r in b.rollouts if r.greedy} == {True, False}


def test_nothing_starts_before_it_is_asked_for() -> None:
    engine = SlowEngine()
    with RunAhead(source(engine, Equal()).steps(2), SharedWeights(engine), max_lag=1) as ahead:
        with ahead.idle():
            pass
        assert engine.began == []
        assert "rollouts" not in {thread.name for thread in threading.enumerate()}


def test_a_loop_that_never_syncs_is_told_so() -> None:
    """Instead of waiting for ever for a batch that may not be made."""
    engine = SlowEngine()
    with RunAhead(source(engine, Equal()).steps(9), SharedWeights(engine), max_lag=2) as ahead:
        for _ in range(3):
            next(ahead)
        with pytest.raises(RuntimeError, match="call sync after each batch"):
            next(ahead)


def failing(number: int, error: BaseException) -> Iterator[Collected]:
    """Batches, the one with this number broken."""
    for _ in range(number):
        yield Collected(rollouts=[])
    raise error


@pytest.mark.parametrize("error", [ValueError("engine"), KeyboardInterrupt(), SystemExit(2)])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_error_is_raised_in_place_of_its_batch(error: BaseException, number: int) -> None:
    """The batches before it are learned; the traceback shows where in the producer it was."""
    learned: list[Collected] = []
    ahead = RunAhead(failing(number, error), lambda version: None, max_lag=2)

    def learn() -> None:
        for batch in ahead:
            learned.append(batch)
            ahead.sync(len(learned))

    with pytest.raises(type(error)) as caught:
        learn()
    assert len(learned) == number
    assert caught.value is error
    assert "failing" in "".join(traceback.format_exception(caught.value))
    assert list(ahead) == []


class Stopped(BaseException):
    """What ends a run early: Ctrl-C, or anything else."""


@pytest.mark.parametrize("where", ["at once", "in the middle"])
def test_an_early_end_breaks_off_the_batch_under_way(where: str) -> None:
    """The engine would sample for a minute; leaving the block does not wait for it."""
    sampling, sampled = threading.Event(), threading.Event()

    def batches() -> Iterator[Collected]:
        yield Collected(rollouts=[])
        sampling.set()
        for _ in range(60_000):
            time.sleep(0.001)
        sampled.set()

    def learn() -> None:
        with RunAhead(batches(), lambda version: None, max_lag=1) as ahead:
            next(ahead)
            if where == "in the middle":
                sampling.wait()
            raise Stopped

    with pytest.raises(Stopped):
        learn()
    assert not sampled.is_set()


def test_closing_an_idle_or_finished_producer_ends_it() -> None:
    """Also where batches wait that nobody will learn, and where none was ever asked for."""
    engine = SlowEngine()
    RunAhead(source(engine, Equal()).steps(2), SharedWeights(engine), max_lag=1).close()
    waiting = RunAhead(source(engine, Equal()).steps(9), SharedWeights(engine), max_lag=3)
    next(waiting)
    with waiting.idle():
        pass
    waiting.close()
    for _ in range(50):  # at every moment of a batch
        short = RunAhead(source(engine, Equal()).steps(9), SharedWeights(engine), max_lag=1)
        next(short)
        time.sleep(random.random() * 1e-3)
        short.close()


def test_nobody_else_uses_the_engine_while_it_is_lent() -> None:
    """Evaluation between two steps: it has the newest version, and the thread makes nothing."""
    engine = SlowEngine(lambda: 0.01)
    with RunAhead(source(engine, Equal()).steps(5), SharedWeights(engine), max_lag=1) as ahead:
        for number, _ in enumerate(ahead):
            ahead.sync(number + 1)
            with ahead.idle():
                busy = len(engine.began)
                time.sleep(0.03)
                assert len(engine.began) == busy
                assert engine.version == number + 1


def test_no_lag_is_refused() -> None:
    with pytest.raises(ValueError, match="max_lag: must be at least 1, got 0"):
        RunAhead(iter(()), lambda version: None, max_lag=0)
