"""The real queues with work that only sleeps: run-ahead and the pool of engines, without a core.

What the simulation of posttrain plan says of them must hold to a few per cent on any machine,
however busy: a thread that sleeps takes no time from others.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from posttrain.distributed.engine_host import EngineHost
from posttrain.distributed.engine_pool import ROUNDS, EnginePool
from posttrain.distributed.plans.compared import CALL
from posttrain.distributed.plans.simulate import (
    Costs,
    Layout,
    Line,
    balanced,
    communication,
    sampling_seconds,
    simulate,
)
from posttrain.distributed.ray_start import init
from posttrain.distributed.replica import RayReplica
from posttrain.protocols import Learner, Reply, Sync
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected, Part, Prompt, Rollout, Sampling, Turn

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


ON_RAY = (Case(1, 2, 0), Case(1, 2, 1))


class SleepingEngine:
    """An engine that takes as long as the lengths cost that its prompts spell."""

    version = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        reply: Reply | None = None,
        part: Part | None = None,
    ) -> list[list[Rollout]]:
        """Sleep, and say nothing of worth."""
        lengths = [int(prompt.text) for prompt in prompts]
        time.sleep(sampling_seconds(lengths, COSTS.decode))
        turns = [Turn(tokens=(1,) * n, text="", logprobs=(0.0,) * n) for n in lengths]
        made = zip(prompts, turns, strict=True)
        return [[Rollout(prompt=p, turns=(turn,), group=n)] for n, (p, turn) in enumerate(made)]

    def sync(self, learner: Learner) -> Sync:
        """Weights are nothing to it."""
        return lambda version: None

    def close(self) -> None:
        """Nothing is held."""


class Here:
    """A replica in this process."""

    def __init__(self, name: str) -> None:
        self.name, self._host = name, EngineHost()

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""

    def call(self, method: str, *given: Any) -> Any:
        """Ask the host."""
        return getattr(self._host, method)(*given)


def layout_of(case: Case, *, on_ray: bool) -> Layout:
    """The cluster of a case, with the pool's own pieces; a call to a thread costs nothing."""
    return Layout(
        **case._asdict(),
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        bandwidth=1.0,
        learner_bandwidth=100.0,
        rounds=ROUNDS,
        call=CALL if on_ray else 0.0,
    )


def measure(case: Case, *, steps: int, on_ray: bool) -> float:
    """Mean seconds of a step of the real queues, with engines in threads or in actors of Ray."""
    drawn, layout = random.Random(1), layout_of(case, on_ray=on_ray)

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

    names = [f"engine {number}" for number in range(case.engines)]
    replicas: list[Any] = [Here(name) for name in names]
    if on_ray:
        replicas = [RayReplica(name, deadline=120.0, num_cpus=0.1) for name in names]
    pool = EnginePool(replicas, SleepingEngine, longest=None, probe=None, deadline=120.0)
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


def rows(*, steps: int, on_ray: bool = False) -> list[dict[str, Any]]:
    """Predicted beside measured, case by case."""
    ray = init("local", cpus=2) if on_ray else None
    try:
        return [
            {
                "case": "asleep in actors" if on_ray else "asleep",
                "setting": f"{case.learners} + {case.engines}, max_lag {case.max_lag}",
                "measured": measure(case, steps=steps, on_ray=on_ray),
                "predicted": {"": simulate(COSTS, layout_of(case, on_ray=on_ray), steps=400).step},
            }
            for case in (ON_RAY if on_ray else CASES)
        ]
    finally:
        if ray is not None:
            ray.shutdown()
