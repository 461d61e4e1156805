"""Learner ranks as Ray actors: killed, stopped and failing ones, and what is said of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import critic_parts
import pytest
import torch
from faults.ray_processes import actors, until
from learner_parts import LocalRequest, local, on_ray, ray_of_tests

from posttrain.algorithms.weights import sequence_mean
from posttrain.distributed import ray_group
from posttrain.distributed.remote_learner import RemoteLearner
from posttrain.learn.ranks import Ranks
from posttrain.protocols import Learner, Objective, Outputs
from posttrain.types import Batch, Terms

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[Any]:
    """A Ray cluster of this process."""
    with ray_of_tests() as ray:
        yield ray


def shown(learner: Learner, *, steps: int = 3, at: Callable[[int], None] = lambda _: None) -> Any:
    told: list[Any] = []
    for step in range(steps):
        at(step)
        seen = learner.infer(sequence_mean(critic_parts.batch()))
        result = learner.step(seen, critic_parts.objective)
        told += [seen.need("values").tolist(), result]
        learner.version += 1
    return [*told, {name: weight.tolist() for name, weight in learner.weights().items()}]


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_that_is_killed_between_and_within_calls_changes_nothing(
    tmp_path: Path, size: int
) -> None:
    first = on_ray(tmp_path / "one", size=size)
    expected = shown(first)
    first.close()
    timers: list[threading.Timer] = []

    def kill(step: int) -> None:
        if step == 1:  # between two calls
            os.kill(processes(learner)[-1], signal.SIGKILL)
        if step == 2:  # within the next ones, somewhere
            victim = processes(learner)[0]
            timers.append(threading.Timer(0.02, lambda: os.kill(victim, signal.SIGKILL)))
            timers[0].start()

    said: list[str] = []
    learner = on_ray(tmp_path / "other", size=size, say=said.append)
    assert shown(learner, at=kill) == expected
    timers[0].join()
    learner.micro_batch_tokens  # noqa: B018 - the second kill may have come after the last call
    assert learner.restarts == 2
    assert all("has died during" in text or "has lost another" in text for text in said)
    learner.close()
    until(lambda: not actors("LearnerRank"), why="ranks end with their learner")


def processes(learner: RemoteLearner) -> list[int]:
    """Those of its ranks now; others, that were closed or killed, may not have ended yet."""
    import ray

    ranks: Any = learner._ranks
    return [pid for pid, _ in ray.get([actor.place.remote() for actor in ranks._actors])]


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    alone = shown(local("separate", reference=True))
    learner = on_ray(tmp_path, size=2)
    found = shown(learner)
    own = os.getpriority(os.PRIO_PROCESS, 0)  # Ray would put them 15 behind
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in processes(learner)} == {own}
    learner.close()
    for one, other in zip(alone[:-1], found[:-1], strict=True):
        if isinstance(one, list):
            assert_close(other, one)
        else:
            assert other.loss == pytest.approx(one.loss, rel=1e-6)
            assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-6)
    for name, weight in alone[-1].items():
        assert_close(found[-1][name], weight)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-9)


def test_a_rank_that_stands_still_is_named_and_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_group, "GRACE", 20.0)  # for the other one to say that it lives
    said: list[str] = []
    learner = on_ray(tmp_path, size=2, deadline=600.0, say=said.append)
    first = learner.infer(critic_parts.batch())
    stopped = processes(learner)[-1]
    os.kill(stopped, signal.SIGSTOP)
    learner._ranks._deadline = 2.0  # type: ignore[union-attr] - of these, not of those that follow
    again = learner.infer(critic_parts.batch())
    assert torch.equal(first.need("values"), again.need("values"))
    assert learner.restarts == 1
    named = f"(process {stopped} on 127.0.0.1), whose process stands still, did not answer infer"
    assert named in said[0]
    assert "within 2 s (cluster.deadline)" in said[0]
    until(lambda: stopped not in actors("LearnerRank"), why="Ray kills it, stopped as it is")
    learner.close()


@Objective
def fails_in_some_rows(outputs: Outputs, part: Batch) -> Terms:
    """As a loss of a user's own that breaks on one sequence, in the rank that has it."""
    if bool((part.tokens[:, 0] == 11).any()):
        raise ValueError("my loss: no such sequence")
    return critic_parts.objective(outputs, part)


def test_an_error_of_one_rank_is_raised_as_it_is_and_the_ranks_go_on_in_step(
    tmp_path: Path,
) -> None:
    """The other rank waits for the one that failed: both are begun anew, and nothing is lost."""
    learner, other = (on_ray(tmp_path / name, size=2) for name in ("one", "other"))
    shown(learner, steps=1)
    with pytest.raises(ValueError, match=r"^my loss: no such sequence$"):
        learner.step(learner.infer(sequence_mean(critic_parts.batch())), fails_in_some_rows)
    assert shown(learner, steps=1) == shown(other, steps=2)[-3:]
    learner.close()
    other.close()


@dataclass(frozen=True)
class Unbuildable(LocalRequest):
    def make(self, ranks: Ranks) -> Any:
        raise ValueError("model: no such folder")


def test_what_is_wrong_with_the_model_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model: no such folder$"):
        on_ray(tmp_path, size=2, request=Unbuildable())


def test_a_rank_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RuntimeError, match=r"started anew 4 times in a row.*has died during build"):
        on_ray(tmp_path, size=1, say=said.append, request=Deadly())
    assert len(said) == 4


@dataclass(frozen=True)
class Deadly(LocalRequest):
    def make(self, ranks: Ranks) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
