"""The weights of a module under other names: rounded beforehand, and with one place for a gradient.

What is recorded must find everything where it was, and must not meet a weight that some graph of
another stream still holds. So passes are computed with aliases of the weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from posttrain.fast.cast_copy import matrices
from posttrain.models.head import HALF


class Aliases:
    """Aliases of the weights that learn.

    Matrices that autocast would round to ``compute`` in every pass are kept rounded
    (:meth:`refresh`); the others are the same memory under another name. A gradient of an alias is
    added to the ``.grad`` of its weight as soon as it is there, and that always stands at the same
    place (:meth:`bring_slopes`).
    """

    def __init__(self, module: nn.Module, compute: torch.dtype) -> None:
        learning = {name: w for name, w in module.named_parameters() if w.requires_grad}
        rounded = matrices(module) if compute in HALF else {}
        self._weights = list(learning.values())
        self.named: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach().to(compute if name in rounded else weight.dtype))
            for name, weight in learning.items()
        }
        self._slopes = [torch.zeros_like(weight) for weight in self._weights]
        for alias, slope in zip(self.named.values(), self._slopes, strict=True):
            alias.register_post_accumulate_grad_hook(partial(_add_to, slope))

    def refresh(self) -> None:
        """Round the weights again: they may have changed."""
        pairs = zip(self.named.values(), self._weights, strict=True)
        rounded = [(alias, weight) for alias, weight in pairs if alias.dtype != weight.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([alias for alias, _ in rounded], [w for _, w in rounded])

    def bring_slopes(self) -> None:
        """Have the gradient of every weight where that of its alias is added to it."""
        pairs = list(zip(self._weights, self._slopes, strict=True))
        missing = [slope for weight, slope in pairs if weight.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        for weight, slope in pairs:
            if weight.grad is not None and weight.grad is not slope:
                slope.copy_(weight.grad)
            weight.grad = slope


def _add_to(slope: Tensor, alias: Tensor) -> None:
    """Move a gradient to its place."""
    found, alias.grad = alias.grad, None  # first: what fails below must leave nothing behind
    assert found is not None
    slope.add_(found)
