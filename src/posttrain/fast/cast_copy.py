"""Weights of a model that are cast to half precision once, and not by autocast at every use.

A copy of a model samples with them; passes that are captured in CUDA graphs learn with them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.fast.fused_linear import fuse_linears
from posttrain.models.head import HALF


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that autocast casts where they are used, by name: not embeddings, nor vectors.

    >>> list(matrices(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))))
    ['1.weight']
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.ndim >= 2 and id(weight) not in embeddings
    }


class CastCopy:
    """A copy of a model for sampling under autocast, with every cast of a weight done beforehand.

    Autocast casts the float32 matrices at every use; here they are kept cast, so a step reads half
    the bytes and computes the same (fused layers may sum in another order), and so are the biases
    of linear layers. Embeddings and norms are the model's own tensors. :meth:`refresh` brings what
    was cast up to date, on the device and in place. Layers are fused, which copies frozen matrices
    that are in half precision already (the base of adapters); without ``fuse_frozen`` those stay
    the model's.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, fuse_frozen: bool = True) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        known: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        biases = [layer.bias for layer in linears if layer.bias is not None]
        for weight in (*matrices(model).values(), *biases):
            known[id(weight)] = self._cast(weight, dtype)
        self.model: Any = copy.deepcopy(model, known)
        head = self.model.get_output_embeddings()
        if head.weight.dtype != dtype:  # tied weights: only the head is cast
            head.weight = self._cast(model.get_output_embeddings().weight, dtype)
        own = {id(weight) for weight in self.model.parameters()}
        cast = {id(weight) for weight in self._targets}
        fuse_linears(self.model, leave=set() if fuse_frozen else own - cast)

    def refresh(self) -> None:
        """Cast the model's current weights again."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)

    def _cast(self, parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
        cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        if parameter.dtype != dtype:  # else they are one and the same
            self._sources.append(parameter.detach())
            self._targets.append(cast)
        return cast


def frozen_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the matrices that a sampling copy in this type shares, unless it fuses them."""
    found = [w for w in matrices(model).values() if w.dtype == dtype and not w.requires_grad]
    return sum(weight.numel() * weight.element_size() for weight in found)


class Aliases:
    """Aliases of the weights that learn, with gradients at fixed addresses.

    A CUDA graph reads and writes fixed addresses, and its capture must not meet a weight that an
    autograd graph of another stream still holds. So captured passes are computed with aliases.
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
