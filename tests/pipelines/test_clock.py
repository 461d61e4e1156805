"""The clock: what source and sync take is waiting, and the rest of a step is training."""

import time

import pytest
from loop_parts import FakeLearner, collected, plan

from posttrain.pipelines.clock import Clock
from posttrain.pipelines.rl import train
from posttrain.protocols import Objective, StepResult
from posttrain.types import Batch


class Time:
    """A clock that moves when it is told to."""

    now = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Slow(FakeLearner):
    def __init__(self, clock: Time) -> None:
        super().__init__()
        self._clock = clock

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        self._clock.passes(3)
        return super().step(batch, objective)


def test_waiting_and_training_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s to sample, 2 optimiser steps of 3 s, 1 s to sync; what follows a step is not counted."""
    moved = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: moved.now)

    def batches():
        for _ in range(2):
            moved.passes(10)
            yield collected(1.0, 0.0)

    clock, found = Clock(), []
    train(
        clock.source(batches()),
        Slow(moved),
        plan=plan(epochs=2),
        sync=clock.sync(lambda version: moved.passes(1)),
        pad_token=0,
        seed=0,
        on_step=lambda step: (found.append(clock.seconds()), moved.passes(100)),
    )
    assert found == [{"time/wait": 11.0, "time/train": 6.0}] * 2
