"""Counts skipped optimiser steps, stores their batches, and stops the stage after too many."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.protocols import Learner, Objective, StepResult
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A skipped optimiser step: the ``number``-th on the batch of ``step``, both from 1."""

    step: int
    number: int
    batch: Batch
    result: StepResult


def is_finite(batch: Batch) -> bool:
    """Whether the inferred log-probs and values of a batch are finite at every chosen token.

    >>> is_finite(Batch.from_rewards([1.0]).replace(old_logprobs=torch.tensor([[math.nan]])))
    False
    """
    inferred = (batch.old_logprobs, batch.ref_logprobs, batch.teacher_logprobs, batch.values)
    known = [numbers[batch.mask] for numbers in inferred if numbers is not None]
    return all(bool(torch.isfinite(numbers).all()) for numbers in known)


def as_skipped(result: StepResult) -> StepResult:
    """A step on a batch that is not finite, as a skipped one: nothing was learned from it."""
    return replace(result, loss=math.nan, gradient_norm=math.nan, skipped=True)


@dataclass(kw_only=True)
class Guard:
    """Counts skipped steps, and stops the stage after ``most`` of them in a row.

    ``keep`` stores the batch of one for inspection; ``where`` says in the error where that is.
    ``total`` and ``in_a_row`` are its whole state.
    """

    most: int = 3
    keep: Callable[[Skipped], None] | None = None
    where: str = ""
    total: int = 0
    in_a_row: int = 0

    def count(self, result: StepResult, batch: Batch, *, step: int, number: int) -> None:
        """Count an optimiser step; one without an active token is neither good nor skipped."""
        if result.skipped:
            self.total += 1
            self.in_a_row += 1
            if self.keep is not None:
                self.keep(Skipped(step=step, number=number, batch=batch, result=result))
        elif result.metrics:
            self.in_a_row = 0

    def check(self) -> None:
        """Stop the stage where too many were skipped; to be called once the step is logged."""
        if self.in_a_row < self.most:
            return
        kept = f" Their batches are kept in {self.where}." if self.where else ""
        raise RuntimeError(
            f"the last {self.in_a_row} optimiser steps had a loss or a gradient that is not finite "
            f"(max_skipped = {self.most}). They were skipped, and the weights are as before them."
            f"{kept} Look there for the sequence at fault, and for rewards or advantages that are "
            "too large; lower learning_rate, or set model.dtype and model.compute to float32"
        )


class Guarded:
    """A learner whose steps a guard counts; everything else is passed on to the learner."""

    def __init__(self, learner: Learner, guard: Guard) -> None:
        self._learner = learner
        self.guard = guard
        self._seen = (learner.version, 0)  # a policy version, and the optimiser steps taken from it

    @property
    def version(self) -> int:
        """The policy version of the learner."""
        return self._learner.version

    @version.setter
    def version(self, version: int) -> None:
        self._learner.version = version

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a forward pass of the learner."""
        return self._learner.micro_batch_tokens

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step of the learner, counted."""
        result = self._learner.step(batch, objective)
        version, number = self._seen
        number = number + 1 if version == self.version else 1
        self._seen = (self.version, number)
        counted = result if is_finite(batch) else as_skipped(result)
        self.guard.count(counted, batch, step=self.version + 1, number=number)
        return result

    def infer(self, batch: Batch) -> Batch:
        """The batch with what the learner infers."""
        return self._learner.infer(batch)

    def refresh_reference(self) -> None:
        """Refresh the learner's reference."""
        self._learner.refresh_reference()

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of the learner."""
        return self._learner.weights()

    def save(self, folder: Path) -> None:
        """Write the learner's model."""
        self._learner.save(folder)

    def state(self, folder: Path) -> dict[str, Any]:
        """Write what the learner's next step depends on."""
        return self._learner.state(folder)

    def restore(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Restore the learner from what :meth:`state` wrote."""
        self._learner.restore(folder, numbers)
