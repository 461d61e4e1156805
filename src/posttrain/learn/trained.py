"""Weights with their optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.fast.score import quicken_linears

Schedule = Callable[[int], float]


class Applied(NamedTuple):
    """One optimiser step: the gradient norm before clipping, and the learning rate."""

    gradient_norm: float
    learning_rate: float


class Trained:
    """A module, its optimiser, its schedule and the norm to which its gradient is clipped."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule = lambda step: 1.0,
        max_gradient_norm: float = 1.0,
    ) -> None:
        quicken_linears(module)
        self.module = module
        self.optimizer = optimizer
        self.num_steps = 0
        self._schedule = schedule
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self._max_gradient_norm = max_gradient_norm

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the first parameter group."""
        return self._base_rates[0] * self._schedule(self.num_steps)

    def weights(self) -> dict[str, Tensor]:
        """The weights that learn, by name."""
        return {name: w for name, w in self.module.named_parameters() if w.requires_grad}

    def clear(self) -> None:
        """Set the gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)

    def fill(self) -> None:
        """Set all gradients to 0."""
        for weight in self.weights().values():
            weight.grad = torch.zeros_like(weight)

    def norm(self) -> Tensor:
        """The norm of the gradient before clipping; with NaN or infinity the step is skipped."""
        weights = self.module.parameters()
        norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all ranks

    def apply(self, norm: Tensor) -> Applied:
        """Clip the gradient, whose norm is ``norm``, and take one step."""
        rate, factor = self.learning_rate, self._schedule(self.num_steps)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self._max_gradient_norm, norm)
        self.optimizer.step()
        self.num_steps += 1
        return Applied(gradient_norm=float(norm), learning_rate=rate)

    def skip(self, norm: Tensor) -> Applied:
        """Take no step: weights, moments and schedule stay as if there had been no batch."""
        self.clear()
        return Applied(gradient_norm=float(norm), learning_rate=self.learning_rate)
