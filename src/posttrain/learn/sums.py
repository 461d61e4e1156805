"""Sums of loss and diagnostics over the micro-batches of one step."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.diagnostics import Tally, tally
from posttrain.algorithms.weights import total
from posttrain.learn.ranks import Ranks
from posttrain.learn.trained import Applied
from posttrain.protocols import StepResult
from posttrain.types import Batch, Terms


class Sums:
    """Sums of loss and diagnostics over the micro-batches of one step."""

    def __init__(self) -> None:
        self.empty = True
        self._diagnostics = Tally()
        self.loss: Tensor | float = 0.0
        self._parts: dict[str, Tensor | float] = {}

    def add_and_backward(self, terms: Terms, part: Batch) -> None:
        """Add a micro-batch's share of the loss, and run backward where gradients are enabled."""
        loss = total(terms.loss, part)
        if torch.is_grad_enabled():
            loss.backward()
        self.empty = False
        self.loss += loss.detach().double()  # stays on the device: reading it here would sync
        self._diagnostics += tally(terms, part.active)
        parts = {f"{name}_loss": value for name, value in terms.parts.items()}
        for name, value in {**parts, **terms.weighted}.items():
            self._parts[name] = self._parts.get(name, 0.0) + total(value.detach(), part)

    def over(self, ranks: Ranks) -> Sums:
        """The sums of all ranks."""
        if ranks.size == 1:
            return self
        own = self._diagnostics
        tables = (self._parts, own.sums, own.maxima)
        plain = [{name: float(value) for name, value in table.items()} for table in tables]
        total = Sums()
        for empty, loss, count, (parts, sums, maxima) in ranks.each(
            (self.empty, float(self.loss), float(own.count), plain)
        ):
            total.empty &= empty
            total.loss += loss
            total._diagnostics += Tally(
                sums=_tensors(sums), maxima=_tensors(maxima), count=_tensor(count)
            )
            for name, value in parts.items():
                total._parts[name] = total._parts.get(name, 0.0) + value
        return total

    def result(self, policy: Applied, *, critic: Applied | None) -> StepResult:
        """The step as the loop sees it."""
        metrics = self._diagnostics.summary()
        metrics |= {name: float(value) for name, value in self._parts.items()}
        if critic is not None:
            metrics["critic_gradient_norm"] = critic.gradient_norm
        return StepResult(
            loss=float(self.loss),
            gradient_norm=policy.gradient_norm,
            learning_rate=policy.learning_rate,
            metrics=metrics,
        )


def _tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _tensors(numbers: dict[str, float]) -> dict[str, Tensor]:
    return {name: _tensor(number) for name, number in numbers.items()}
