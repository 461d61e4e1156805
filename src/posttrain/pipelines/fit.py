"""Training on a fixed dataset (demonstrations, preferences): one optimiser step a batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from posttrain.pipelines.metrics import step_metrics
from posttrain.protocols import Learner, Objective, StepResult
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One finished step, counted from 1."""

    step: int
    batch: Batch
    result: StepResult
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The numbers of the step, by the names that ``docs/metrics.md`` explains."""
        return step_metrics([self.result]) | {"time/train": self.seconds}


def fit(
    batches: Iterable[Batch],
    learner: Learner,
    *,
    objective: Objective,
    on_step: Callable[[Fitted], None],
    start: int = 0,
) -> None:
    """One optimiser step on each batch, whose ``weights`` say what counts how much.

    A stage that is resumed has taken ``start`` steps; the learner is the one it had then.
    """
    for step, batch in enumerate(batches, start=start + 1):
        begun = time.perf_counter()
        result = learner.step(batch, objective)
        learner.version += 1
        seconds = time.perf_counter() - begun
        on_step(Fitted(step=step, batch=batch, result=result, seconds=seconds))


def shuffled(
    count: int, batch_size: int, *, steps: int, seed: int, start: int = 0
) -> Iterator[list[int]]:
    """Which rows make each batch: every epoch is a new permutation, the seed decides them all.

    The last batch of an epoch may be smaller; of ``steps`` batches the first ``start`` are left
    out.

    >>> [len(batch) for batch in shuffled(5, 2, steps=5, seed=0)]
    [2, 2, 1, 2, 2]
    """

    def orders() -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        while count:
            order = torch.randperm(count, generator=generator).tolist()
            for first in range(0, count, batch_size):
                yield order[first : first + batch_size]

    return itertools.islice(orders(), start, steps)


def num_steps(num_rows: int, batch_size: int, *, epochs: int, steps: int | None = None) -> int:
    """The optimiser steps of a stage: as many as were asked for, or whole epochs.

    >>> num_steps(10, 4, epochs=2), num_steps(10, 4, epochs=1, steps=5)
    (6, 5)
    """
    return -(-num_rows // batch_size) * epochs if steps is None else steps
