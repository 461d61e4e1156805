"""Engines in Ray actors: killed with -9, hung, wrong, short of resources; the same tokens."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.ray_session import ray_actors  # noqa: F401 - a fixture
from distributed.replicas import pool_of
from distributed.test_engine_pool import ASKED, OPTIONS, PROMPTS, SAMPLING, alone, learner_of, moved
from faults.ray_processes import until
from rollout.cases import drawn
from small_model import small_model

from posttrain.distributed.engine_pool import EnginePool
from posttrain.distributed.replica import RayReplica
from posttrain.rollout.engines import NativeEngine, ScriptedEngine
from posttrain.types import Prompt

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_actors")]


@pytest.fixture(autouse=True)
def pieces_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that there are several for each engine."""
    monkeypatch.setattr("posttrain.distributed.engine_pool.ROUNDS", 4)


def actors(count: int = 2, *, deadline: float = 600.0, **options: Any) -> list[RayReplica]:
    given = {"num_cpus": 0.1, **options}
    return [RayReplica(f"engine {n}", deadline=deadline, **given) for n in range(count)]


@pytest.fixture
def pools() -> Iterator[list[EnginePool]]:
    made: list[EnginePool] = []
    yield made
    for pool in made:
        pool.close()


def pool_on_ray(pools: list[EnginePool], model: Any, **options: Any) -> EnginePool:
    import ray

    deadline = options.setdefault("deadline", 600.0)
    options.setdefault("replicas", actors(deadline=deadline))
    pools.append(pool_of(NativeEngine, model, share=ray.put, **options, **OPTIONS))
    return pools[-1]


def pid(pool: EnginePool, number: int) -> int:
    return int(pool._members[number].facts["pid"])


def both_serve(pool: EnginePool) -> None:
    """Wait until both engines are up, and have proven the weights that were pushed last."""

    def ready() -> bool:
        known = pool._board.weights
        return all(each.state == "up" and each._proven is known for each in pool._members)

    until(ready, why="both engines serve")


def test_killed_in_the_middle_of_a_piece(pools: list[EnginePool]) -> None:
    """Engine 0 is stopped, so that it surely has a piece, and then killed; it comes back."""
    model = small_model()
    pool = pool_on_ray(pools, model)
    sync = pool.sync(learner_of(model))
    moved(model, 1.3)
    sync(1)
    both_serve(pool)
    first = pid(pool, 0)
    os.kill(first, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (first, signal.SIGKILL)).start()
    found: dict[str, float] = {}
    while not found.get("cluster/engine_restarts"):  # it may get a piece of the next call only
        assert drawn(pool.generate(PROMPTS, SAMPLING, **ASKED)) == alone(model)
        found = pool.metrics()
    assert (found["cluster/engine_restarts"], found["cluster/retried_groups"]) == (1, 1)
    both_serve(pool)
    assert pid(pool, 0) != first
    os.kill(pid(pool, 1), signal.SIGSTOP)  # now the one that came back must serve
    threading.Timer(1.0, os.kill, (pid(pool, 1), signal.SIGKILL)).start()
    answers = pool.generate(PROMPTS, SAMPLING, **ASKED)
    assert drawn(answers) == alone(model)
    assert {rollout.version for group in answers for rollout in group} == {1}
    assert "engine 0" in {rollout.engine for group in answers for rollout in group}


def test_hung_is_dead_after_the_deadline(pools: list[EnginePool]) -> None:
    model = small_model()
    replicas = actors()
    pool = pool_on_ray(pools, model, replicas=replicas)
    both_serve(pool)
    first = pid(pool, 0)
    os.kill(first, signal.SIGSTOP)
    replicas[0]._deadline = 3.0  # a start may take longer than that, and is tried again
    while not pool.metrics()["cluster/engine_restarts"]:
        assert drawn(pool.generate(PROMPTS, SAMPLING, **ASKED)) == alone(model)
    assert "within 3 s (cluster.deadline)" in pool._members[0].reason
    until(lambda: not Path(f"/proc/{first}").exists(), why="Ray kills it, stopped as it is")


def test_no_resources_is_an_error_that_names_who_waits(pools: list[EnginePool]) -> None:
    replicas = actors(1, deadline=2.0, num_cpus=500)
    pool = pool_on_ray(pools, small_model(), deadline=2.0, replicas=replicas)
    with pytest.raises(RuntimeError, match=r"no engine .* 2 s .*engine 0: .*build.*num_cpus 500"):
        pool.generate(PROMPTS, SAMPLING, **ASKED)


def test_an_error_of_an_engine_keeps_its_type_and_names_it(pools: list[EnginePool]) -> None:
    def scripted(model: Any, **_: Any) -> ScriptedEngine:
        return ScriptedEngine({"x": ["a"]})

    pools.append(pool_of(scripted, small_model(), replicas=actors(1)))
    with pytest.raises(ValueError, match="the script has no answer to 'y'") as raised:
        pools[0].generate([Prompt(id="0", text="y", tokens=(1,))], SAMPLING, **ASKED)
    assert "raised by engine 0 in decode" in raised.value.__notes__
