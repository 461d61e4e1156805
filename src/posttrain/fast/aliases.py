"""Aliases of the weights of a module: cast beforehand, with gradients at fixed addresses.

A CUDA graph reads and writes fixed addresses, and its capture must not meet a weight that an
autograd graph of another stream still holds. So passes are computed with aliases of the weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from posttrain.fast.cast_copy import matrices
from posttrain.models.head import HALF


class Aliases:
    """Aliases of the weights that learn.

    Matrices that autocast would cast to ``compute`` in every pass are kept cast (:meth:`refresh`);
    the others share the memory of their weight. A gradient of an alias is added to the ``.grad`` of
    its weight as soon as it is computed, at an address that never changes
    (:meth:`attach_gradients`).
    """

    def __init__(self, module: nn.Module, compute: torch.dtype) -> None:
        learning = {name: w for name, w in module.named_parameters() if w.requires_grad}
        rounded = matrices(module) if compute in HALF else {}
        self._weights = list(learning.values())
        self.named: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach().to(compute if name in rounded else weight.dtype))
            for name, weight in learning.items()
        }
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        for alias, gradient in zip(self.named.values(), self._gradients, strict=True):
            alias.register_post_accumulate_grad_hook(partial(_add_to, gradient))

    def refresh(self) -> None:
        """Cast the weights again: they may have changed."""
        pairs = zip(self.named.values(), self._weights, strict=True)
        rounded = [(alias, weight) for alias, weight in pairs if alias.dtype != weight.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([alias for alias, _ in rounded], [w for _, w in rounded])

    def attach_gradients(self) -> None:
        """Let ``.grad`` of each weight be the tensor that its alias's gradient is added to."""
        pairs = list(zip(self._weights, self._gradients, strict=True))
        missing = [gradient for weight, gradient in pairs if weight.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        for weight, gradient in pairs:
            if weight.grad is not None and weight.grad is not gradient:
                gradient.copy_(weight.grad)
            weight.grad = gradient


def _add_to(gradient: Tensor, alias: Tensor) -> None:
    """Add the gradient of an alias to that of its weight."""
    found, alias.grad = alias.grad, None  # an error in the sum must leave no gradient behind
    assert found is not None
    gradient.add_(found)
