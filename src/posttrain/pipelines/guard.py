"""What a stage does about optimiser steps that the learner skipped: count, keep, and stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from posttrain.protocols import StepResult
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A skipped optimiser step: the ``number``-th on the batch of ``step``, both from 1."""

    step: int
    number: int
    batch: Batch
    result: StepResult


def has_no_numbers(batch: Batch) -> bool:
    """Whether what the models said of a batch before the first step is NaN or infinite somewhere.

    >>> batch = Batch.from_rewards([1.0])
    >>> has_no_numbers(batch.replace(old_logprobs=torch.tensor([[float("nan")]])))
    True
    """
    said = (batch.old_logprobs, batch.ref_logprobs, batch.values)
    known = [numbers[batch.mask] for numbers in said if numbers is not None]
    return not all(bool(torch.isfinite(numbers).all()) for numbers in known)


@dataclass(kw_only=True)
class Guard:
    """Counts skipped steps, and stops the stage after ``most`` of them in a row.

    ``keep`` stores the batch of one for inspection; ``where`` says in the error where that is.
    ``total`` and ``in_a_row`` are all that it remembers.
    """

    most: int = 3
    keep: Callable[[Skipped], None] | None = None
    where: str = ""
    total: int = 0
    in_a_row: int = 0

    def saw(self, result: StepResult, batch: Batch, *, step: int, number: int = 1) -> None:
        """Count an optimiser step; one without an active token says nothing."""
        if result.skipped:
            self.total += 1
            self.in_a_row += 1
            if self.keep is not None:
                self.keep(Skipped(step=step, number=number, batch=batch, result=result))
        elif result.metrics:
            self.in_a_row = 0

    def check(self) -> None:
        """Stop the stage where too many were skipped; called when the step is logged."""
        if self.in_a_row < self.most:
            return
        kept = f" Their batches are kept in {self.where}." if self.where else ""
        raise RuntimeError(
            f"the last {self.in_a_row} optimiser steps had a loss or a gradient that is not finite "
            f"(max_skipped = {self.most}). They were skipped, and the weights are as before them."
            f"{kept} Look there for the sequence at fault, and for rewards or advantages that are "
            "too large; lower learning_rate, or set model.dtype and model.compute to float32"
        )
