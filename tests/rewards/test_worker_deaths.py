"""Workers that die through no fault of the sample they are at: nobody pays, and it is counted."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rewards.mishaps import Pooled, rollouts

from posttrain import forked
from posttrain.rewards import pool, pool_worker
from posttrain.rewards.pool import MAX_FAILED_STARTS, TRIES
from posttrain.rewards.scorer import RewardScorer


def once(file: Path) -> bool:
    """True the first time that any process asks."""
    try:
        file.open("x").close()
    except FileExistsError:
        return False
    return True


def processes(scorer: RewardScorer) -> list[int]:
    return [member._process.pid for member in scorer.grader._workers]


def wait_until_dead(scorer: RewardScorer, number: int) -> None:
    """Until so many of the workers are, with nothing known of it to the pool."""
    stats = [Path(f"/proc/{process}/stat") for process in processes(scorer)]
    while sum(stat.read_text().rpartition(")")[2].split()[0] == "Z" for stat in stats) < number:
        time.sleep(0.01)


def all_right(scorer: RewardScorer, count: int = 60) -> None:
    scores = scorer.score(rollouts(count))
    assert [(score.state, score.value) for score in scores] == [("ok", n) for n in range(count)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victims", [1, 2])
def test_workers_killed_while_they_wait_are_replaced(
    number: int, victims: int, *, pooled: Pooled
) -> None:
    scorer = pooled(lambda n: float(n))
    all_right(scorer)
    for process in processes(scorer)[:victims]:
        os.kill(process, number)
    wait_until_dead(scorer, victims)
    all_right(scorer)
    assert scorer.grader.died == victims
    all_right(scorer)
    assert scorer.grader.died == victims


@pytest.mark.parametrize("handed", ["before it is handed work", "with work in its line"])
def test_a_worker_that_dies_as_it_is_chosen(
    handed: str, *, pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death is not known yet when the work is sent; once for each of the first five chunks."""
    scorer, start, victims = pooled(lambda n: float(n)), pool._Worker.start, []

    def dies(self: pool._Worker, *work: object) -> None:
        process = self._process.pid
        if len(victims) < 5:
            victims.append(process)
            if handed == "with work in its line":
                os.kill(process, signal.SIGSTOP)
                start(self, *work)
                os.kill(process, signal.SIGKILL)
                return
            os.kill(process, signal.SIGKILL)
            self._process.join()
        start(self, *work)

    monkeypatch.setattr(pool._Worker, "start", dies)
    all_right(scorer)
    assert len(set(victims)) == scorer.grader.died == 5


def crash() -> None:
    faulthandler.disable()  # pytest's, which would print where
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("end", [lambda: os._exit(0), crash], ids=["leaves", "crashes"])
def test_a_thread_that_an_answered_sample_left_behind(
    end: Callable[[], None], *, pooled: Pooled, tmp_path: Path
) -> None:
    """It ends the worker while another sample is at work there, and another while it waits."""
    go = tmp_path / "go"
    left: list[int] = []  # of one worker

    def late(signal: Path) -> None:
        while not signal.exists():
            time.sleep(0.001)
        end()

    def reward(n: int) -> float:
        if n in (3, 57) and once(tmp_path / str(n)):
            left.append(n)
            signal = go if n == 3 else tmp_path / "later"
            threading.Thread(target=late, args=(signal,), daemon=True).start()
        if n == 50 and left:
            go.touch()
            time.sleep(60)
        return float(n)

    scorer = pooled(reward, seconds=30.0, workers=1)
    all_right(scorer)
    assert scorer.grader.died == 1
    (tmp_path / "later").touch()
    wait_until_dead(scorer, 1)
    all_right(scorer)
    assert scorer.grader.died == 2


def test_a_sample_at_which_a_worker_died_is_tried_in_a_new_one(
    pooled: Pooled, tmp_path: Path
) -> None:
    graded: list[int] = []  # of one worker

    def reward(n: int) -> float:
        if n == 21 and once(tmp_path / "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        graded.append(n)
        return float(len(graded))

    scorer = pooled(reward)
    scores = scorer.score(rollouts(60))
    assert all(score.ok for score in scores)
    assert scores[21].value == 1.0
    assert scorer.grader.died == 1


def test_what_ends_its_workers_every_time_is_broken_and_says_so(
    pooled: Pooled, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"

    def reward(n: int) -> float:
        if n == 3:
            with tries.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGRTMIN + 1)  # which has no name
        return float(n)

    scorer = pooled(reward)
    scores = scorer.score(rollouts(8))
    number = signal.SIGRTMIN + 1
    assert scores[3].state == "crashed"
    assert scores[3].reason == (
        f"reward 'reward' ended its worker process (signal {number}), {TRIES} times"
    )
    assert [score.value for score in scores] == [0, 1, 2, 0, 4, 5, 6, 7]
    assert len(tries.read_text()) == scorer.grader.died == TRIES


@pytest.mark.parametrize("fails", [5, 1000])
def test_workers_that_die_while_they_start(
    fails: int, *, pooled: Pooled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some of them: nobody pays; every one: no sample is to blame, and there is an end to it."""
    settle = pool_worker.settle

    def dies(memory_mb: int) -> None:
        if any(once(tmp_path / str(number)) for number in range(fails)):
            os._exit(9)
        settle(memory_mb)

    monkeypatch.setattr(pool_worker, "settle", dies)
    scorer = pooled(lambda n: float(n))
    if fails < MAX_FAILED_STARTS:
        all_right(scorer)
        assert scorer.grader.died == fails
    else:
        with pytest.raises(RuntimeError, match=r"before they began \(exit code 9\).*memory_mb"):
            scorer.score(rollouts(60))
        assert scorer.grader.died >= MAX_FAILED_STARTS


def test_a_sample_that_is_more_than_a_worker_can_read(pooled: Pooled) -> None:
    """It ends every worker that gets it, and it alone pays."""
    scorer, given = pooled(lambda n, huge="": float(n), memory_mb=64), rollouts(16)
    given[5].prompt.columns["huge"] = b"x" * 2**27
    scores = scorer.score(given)
    assert [n for n, score in enumerate(scores) if not score.ok] == [5]
    assert f"ended its worker process (exit code 1), {TRIES} times" in scores[5].reason


@pytest.mark.parametrize("holder", [False, True], ids=["closed", "held open by a child"])
def test_a_message_that_is_cut_short(
    holder: bool, *, pooled: Pooled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half of it is no answer; nobody waits for the other half, though it may seem to come."""
    send, child = pool_worker._Outbox.send, tmp_path / "child"

    def half(self: pool_worker._Outbox, *, last: bool) -> None:
        if 7 in [number for number, _ in self._waiting] and once(tmp_path / "cut"):
            message = json.dumps({"results": self._waiting, "last": last}).encode()
            self._answers.write(message[: len(message) // 2])
            self._answers.flush()
            if holder:
                child.write_text(str(os.fork() or time.sleep(300)))
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, last=last)

    monkeypatch.setattr(pool_worker._Outbox, "send", half)
    scorer = pooled(lambda n: float(n), seconds=60.0)
    try:
        all_right(scorer)
    finally:
        if holder:
            os.kill(int(child.read_text()), signal.SIGKILL)
    assert scorer.grader.died == 1


def test_a_worker_that_says_what_is_no_result(
    pooled: Pooled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def garbled(self: pool_worker._Outbox, *, last: bool) -> None:
        if once(tmp_path / "said"):
            self._answers.write(b"[1, 2\n")
        if once(tmp_path / "said more"):
            self._answers.write(b'{"results": [[0, [["x", {"wert": 1}]]]], "last": false}\n')
        send(self, last=last)

    send = pool_worker._Outbox.send
    monkeypatch.setattr(pool_worker._Outbox, "send", garbled)
    all_right(pooled(lambda n: float(n)))


@pytest.mark.slow
def test_a_worker_that_does_not_read(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of more than fits into its line, and of less: neither is waited for without end."""
    monkeypatch.setattr(pool, "START", 5.0)
    scorer = pooled(lambda n, completion: float(n), seconds=5.0)
    os.kill(processes(scorer)[0], signal.SIGSTOP)
    given = rollouts(16)
    for rollout in given[:4]:
        object.__setattr__(rollout.turns[0], "text", "x" * 2**20)
    assert [score.value for score in scorer.score(given)] == list(range(16))
    os.kill(processes(scorer)[1], signal.SIGSTOP)
    all_right(scorer)


def test_a_limit_that_a_library_sets_for_every_socket(pooled: Pooled) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    try:
        scorer = pooled(lambda n: float(n))
    finally:
        socket.setdefaulttimeout(before)
    all_right(scorer)
    time.sleep(0.5)  # longer than the limit
    all_right(scorer)
    assert scorer.grader.died == 0


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_system_that_has_no_process_left(
    failures: int, *, pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again; where that does not help, the message says what to do."""
    scorer = pooled(lambda n: float(n))
    all_right(scorer)
    os.kill(processes(scorer)[0], signal.SIGKILL)
    wait_until_dead(scorer, 1)
    asked, fork = [], os.fork

    def scarce() -> int:
        asked.append(1)
        if len(asked) <= failures:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(forked, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(os, "fork", scarce)
    expected = contextlib.nullcontext()
    if failures == 1000:
        expected = pytest.raises(RuntimeError, match=r"temporarily unavailable.*grading\.workers")
    with expected:
        all_right(scorer)
    monkeypatch.setattr(os, "fork", fork)
    all_right(scorer)


def test_what_the_display_raises_is_not_taken_for_the_death_of_a_worker(pooled: Pooled) -> None:
    def progress(done: int, total: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    scorer = pooled(lambda n: float(n), progress=progress)
    with pytest.raises(BrokenPipeError):
        scorer.score(rollouts(8))
    assert scorer.grader.died == 0


def test_a_pool_whose_workers_are_dead_or_stuck_can_be_closed(pooled: Pooled) -> None:
    scorer = pooled(lambda n: float(n))
    first, second = members = processes(scorer)
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGSTOP)
    scorer.grader.close()
    assert not [process for process in members if Path(f"/proc/{process}").exists()]
    with pytest.raises(AssertionError, match="closed"):
        scorer.score(rollouts(1))


def test_an_answer_in_time_that_is_read_late_is_no_timeout(
    pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process may be held up: by the copying of a large process, by one that does not read."""
    listen, held_up = pool.GradingPool._listen, []

    def listens_late(self: pool.GradingPool, job: object) -> None:
        if held_up:
            return listen(self, job)
        for member in self._workers:
            assert pool.wait([member.line])
        held_up.append(time.sleep(0.2))  # more than the limit
        return None

    monkeypatch.setattr(pool.GradingPool, "_listen", listens_late)
    all_right(pooled(lambda n: float(n), seconds=0.1), count=2)
