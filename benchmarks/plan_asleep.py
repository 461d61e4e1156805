"""The real queues with work that only sleeps: run-ahead and the pool of engines, without a core.

What the simulation of posttrain plan says of them must hold to a few per cent on any machine,
however busy: a thread that sleeps takes no time from others.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from posttrain.distributed.engine_host import Sequences
from posttrain.distributed.engine_pool import ROUNDS, EnginePool
from posttrain.distributed.plans.simulate import (
    Costs,
    Layout,
    Line,
    balanced,
    communication,
    sampling_seconds,
    simulate,
)
from posttrain.protocols import Engine
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected, Prompt, Rollout, Sampling, Turn

PROMPTS, GROUP = 16, 4
SYNC = 0.05
COSTS = Costs(
    decode=Line(0.0004, 0.0002),
    grading=0.001,
    train=Line(0.05, 0.0001),
    weight_bytes=SYNC,  # over a network of one byte a second
    groups=[[random.Random(n).randint(5, 80) for _ in range(GROUP)] for n in range(64)],
    prompt=10.0,
)


class Case(NamedTuple):
    """A cluster that is asleep."""

    learners: int
    engines: int
    max_lag: int


CASES = tuple(
    Case(learners, engines, max_lag)
    for learners, engines in ((1, 1), (1, 4), (4, 4))
    for max_lag in (0, 1, 2)
)


class Sleeper:
    """A replica that takes as long as its lengths cost, and says nothing of worth."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""

    def call(self, method: str, *given: Any) -> Any:
        """Sleep where something is to be decoded."""
        if method != "decode":
            return {}
        asked: Sequences = given[0]
        lengths = [int(prompt.text) for prompt in asked.prompts]
        time.sleep(sampling_seconds(lengths, COSTS.decode))
        return [Turn(tokens=(1,) * n, text="", logprobs=(0.0,) * n) for n in lengths]


def layout_of(case: Case) -> Layout:
    """The cluster of a case, with the pool's own pieces; a call costs nothing there."""
    return Layout(
        **case._asdict(),
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        bandwidth=1.0,
        learner_bandwidth=100.0,
        rounds=ROUNDS,
    )


def measure(case: Case, *, steps: int) -> float:
    """Mean seconds of a step of the real queues."""
    drawn, layout = random.Random(1), layout_of(case)

    def batches(pool: EnginePool) -> Iterator[Collected]:
        while True:
            groups = [drawn.choice(COSTS.groups) for _ in range(PROMPTS)]
            prompts = [
                Prompt(id=f"{n}-{m}", text=str(length), tokens=(1,) * 10)
                for n, group in enumerate(groups)
                for m, length in enumerate(group)
            ]
            # Each completion is a prompt of its own here, so that its length can be told; the pool
            # cuts between prompts: as many as a group has make one.
            rollouts: list[Rollout] = []
            for answered in pool.generate(prompts, Sampling(), num_samples=1, seed=0):
                rollouts += answered
            time.sleep(COSTS.grading * len(prompts))
            yield Collected(rollouts=rollouts)

    def learn(collected: Collected) -> None:
        sequences = [COSTS.prompt + len(rollout.tokens) for rollout in collected.rollouts]
        most = balanced(sequences, case.learners)[0]
        time.sleep(COSTS.train(most) + communication(COSTS, layout, tokens=most))

    replicas = [Sleeper(f"engine {n}") for n in range(case.engines)]
    pool = EnginePool(replicas, _nothing, longest=None, probe=None, deadline=60.0)
    took: list[float] = []
    try:
        if case.max_lag == 0:
            source: Any = batches(pool)
            for _ in range(steps + 3):
                begun = time.perf_counter()
                learn(next(source))
                time.sleep(SYNC)
                took.append(time.perf_counter() - begun)
        else:
            with RunAhead(batches(pool), lambda _: time.sleep(SYNC), max_lag=case.max_lag) as ahead:
                for version in range(steps + 3):
                    begun = time.perf_counter()
                    learn(next(ahead))
                    ahead.sync(version + 1)
                    took.append(time.perf_counter() - begun)
    finally:
        pool.close()
    return statistics.fmean(took[3:])


def _nothing() -> Engine:
    raise AssertionError("a replica that sleeps makes no engine")


def rows(*, steps: int) -> list[dict[str, Any]]:
    """Predicted beside measured, case by case."""
    return [
        {
            "case": "asleep",
            "setting": f"{case.learners} + {case.engines}, max_lag {case.max_lag}",
            "measured": measure(case, steps=steps),
            "predicted": {"": simulate(COSTS, layout_of(case), steps=400).step},
        }
        for case in CASES
    ]
