"""The grading pool: only the culprit pays, however it misbehaves."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rewards.mishaps import MISHAPS, SECONDS, Pooled, rollouts

from posttrain.rewards.pool import TRIES
from posttrain.rewards.pool_worker import Status
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Score


def test_scores_come_back_in_order_and_as_in_this_process(pooled: Pooled) -> None:
    def first(n: int) -> float:
        return n / 7

    def second(completion: str, *, per_letter: float = 0.5) -> float:
        return per_letter * len(completion)

    given = rollouts(500)
    assert pooled(first, second).score(given) == RewardScorer({first: 1.0, second: 1.0}).score(
        given
    )


def test_rewards_run_elsewhere(pooled: Pooled) -> None:
    scores = pooled(lambda n: os.getpid()).score(rollouts(64))
    assert os.getpid() not in {score.value for score in scores}
    assert len({score.value for score in scores}) == 2


@pytest.mark.parametrize("mishap", MISHAPS)
def test_only_the_culprit_pays(mishap: str, pooled: Pooled) -> None:
    """One of a hundred does it; the others have their scores, and so does the next batch."""
    act, state, reason = MISHAPS[mishap]

    def reward(n: int) -> object:
        return act() if n == 37 else float(n)

    scorer = pooled(reward, seconds=SECONDS if state == "timeout" else 60.0)
    replaced = count_replaced(scorer)
    scores = scorer.score(rollouts(100))
    assert scores[37].state == state
    assert reason in scores[37].reason
    assert "reward 'reward'" in scores[37].reason
    assert [s.value for n, s in enumerate(scores) if n != 37] == [n for n in range(100) if n != 37]
    assert all(score.ok for n, score in enumerate(scores) if n != 37)
    # So often, and not once for each sample that waited behind it.
    assert len(replaced) == {"timeout": 1, "crashed": TRIES}.get(state, 0)
    assert scorer.grader.died == (TRIES if state == "crashed" else 0)
    assert [score.value for score in scorer.score(rollouts(20))] == list(range(20))


def count_replaced(scorer: RewardScorer) -> list[object]:
    """Grows by one with every worker that is replaced from now on."""
    pool, replaced = scorer.grader, []
    hire = pool._start_worker
    pool._start_worker = lambda: replaced.append(1) or hire()
    return replaced


def test_several_mishaps_at_once_and_exactly_those(pooled: Pooled) -> None:
    def reward(n: int) -> float:
        if n % 50 == 7:
            time.sleep(60)
        if n % 50 == 11:
            os._exit(3)
        if n % 50 == 13:
            raise ValueError(n)
        return 1.0

    scores = pooled(reward, seconds=SECONDS).score(rollouts(150))
    states = {n: score.state for n, score in enumerate(scores) if not score.ok}
    assert states == {
        **dict.fromkeys((7, 57, 107), "timeout"),
        **dict.fromkeys((11, 61, 111), "crashed"),
        **dict.fromkeys((13, 63, 113), "invalid"),
    }
    assert "ValueError: 63" in scores[63].details
    assert "Traceback" in scores[63].details


def test_what_a_culprit_started_dies_with_it(pooled: Pooled, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def reward(n: int) -> float:
        if n == 3:
            file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(60)
        return 1.0

    assert pooled(reward, seconds=SECONDS).score(rollouts(8))[3].state == "timeout"
    child = Path("/proc") / file.read_text() / "stat"
    for _ in range(4000):  # it is gone, or waits to be reaped
        state = child.read_text().rpartition(")")[2].split()[0] if child.exists() else "gone"
        if state in ("gone", "Z"):
            break
        time.sleep(0.05)
    assert state in ("gone", "Z")


def test_an_async_reward_runs_many_at_a_time_with_a_limit_for_each(pooled: Pooled) -> None:
    running = 0

    async def reward(n: int) -> float:
        nonlocal running  # of one worker
        running += 1
        most = running
        await asyncio.sleep(60 if n == 5 else 0.01)
        running -= 1
        if n == 6:
            raise ValueError("six")
        return float(most)

    scores = pooled(reward, seconds=SECONDS).score(rollouts(100))
    assert max(score.value for score in scores) > 5  # 1, one after another
    assert {n: score.state for n, score in enumerate(scores) if not score.ok} == {
        5: "timeout",
        6: "invalid",
    }


def test_an_async_reward_that_blocks_is_found_out(pooled: Pooled) -> None:
    async def reward(n: int) -> float:
        if n == 5:
            time.sleep(60)
        await asyncio.sleep(0)
        return float(n)

    scores = pooled(reward, seconds=SECONDS).score(rollouts(20))
    assert [n for n, score in enumerate(scores) if not score.ok] == [5]
    assert scores[5].state == "timeout"


def test_a_batched_reward_gets_lists_and_only_the_culprit_pays(pooled: Pooled) -> None:
    def reward(n: list[int], completion: list[str]) -> list[float]:
        if 5 in n:
            raise ValueError("five")
        assert completion == [f"c{number}" for number in n]
        return [float(number) for number in n]

    reward.batched = True  # type: ignore[attr-defined]
    scores = pooled(reward).score(rollouts(60))
    assert {n: score.state for n, score in enumerate(scores) if not score.ok} == {5: "invalid"}
    assert scores[59].value == 59.0


def test_a_batched_reward_that_hangs_on_one(pooled: Pooled) -> None:
    def reward(n: list[int]) -> list[float]:
        if 5 in n:
            time.sleep(60)
        return [1.0] * len(n)

    reward.batched = True  # type: ignore[attr-defined]
    scores = pooled(reward, seconds=SECONDS).score(rollouts(20))
    assert {n: score.state for n, score in enumerate(scores) if not score.ok} == {5: "timeout"}


def test_a_batched_reward_with_too_few_scores_is_broken(pooled: Pooled) -> None:
    def reward(n: list[int]) -> list[float]:
        return []

    reward.batched = True  # type: ignore[attr-defined]
    scores = pooled(reward).score(rollouts(16))
    assert {score.state for score in scores} == {"invalid"}
    assert "returned list of 0; expected a list of 2, one score" in scores[0].reason


def test_progress_is_counted(pooled: Pooled) -> None:
    seen: list[tuple[int, int]] = []
    pooled(lambda n: 1.0, progress=lambda done, total: seen.append((done, total))).score(
        rollouts(30)
    )
    assert seen == [(n, 30) for n in range(1, 31)]


def test_an_interrupt_leaves_a_pool_that_works(pooled: Pooled) -> None:
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt

    scorer = pooled(lambda n: float(n), progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        scorer.score(rollouts(100))
    assert [score.value for score in scorer.score(rollouts(10))] == list(range(10))


def test_numbers_in_other_clothes_and_numbers_that_are_none(pooled: Pooled) -> None:
    def dressed(n: int) -> Score:
        return Score(value=float(n), parts={"half": np.float32(0.5)})

    def batched(n: list[int]) -> object:
        return np.array(n, dtype=np.float64)

    def huge(n: list[int]) -> list[object]:
        return [10**400 if number == 2 else torch.tensor([1.0, 2.0]) for number in n]

    batched.batched = huge.batched = True  # type: ignore[attr-defined]
    assert pooled(dressed).score(rollouts(3))[2].parts == {"dressed": 2.0, "dressed/half": 0.5}
    assert [score.value for score in pooled(batched).score(rollouts(3))] == [0.0, 1.0, 2.0]
    scores = pooled(huge).score(rollouts(3))
    assert [score.state for score in scores] == ["invalid"] * 3
    assert all("reward 'huge' returned" in score.reason for score in scores)


def test_workers_of_a_thread_that_has_ended_are_replaced(pooled: Pooled) -> None:
    """Linux kills a worker with the thread that made it: the samples after that must not pay."""
    scorer = pooled(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == 3 else float(n))

    def elsewhere() -> None:
        scorer.score(rollouts(4))
        time.sleep(0.5)  # until the new worker has settled

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    time.sleep(0.5)  # until it is dead
    scores = scorer.score(rollouts(3))
    assert [(score.state, score.value) for score in scores] == [("ok", n) for n in range(3)]


def test_what_a_worker_is_at_never_looks_older_than_it_is() -> None:
    status, first = Status(), time.monotonic()
    status.write(0, 0)
    writer = os.fork()
    if writer == 0:
        while True:
            status.write(1, 2)
    try:
        seen = list(_readings(status, seconds=1.0))
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert min(seen) >= first  # a time that is half written is one of long ago


def _readings(status: Status, *, seconds: float) -> Iterator[float]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield status.read()[2]
