"""A module that shares what it can with another, and holds its matrices in half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from posttrain.fast.fused_linear import join


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that autocast rounds where they are used, by name: not embeddings, nor vectors.

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


class HalfCopy:
    """A copy of a model for sampling under autocast, with every cast of a weight done beforehand.

    Autocast rounds the float32 matrices at every use; here they are kept rounded, so a step reads
    half the bytes and computes the same (layers that are joined may sum in another order).
    Embeddings, norms and biases are the model's own tensors. :meth:`refresh` brings the matrices up
    to date, on the device and in place.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        known: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        known |= {id(weight): self._half(weight, dtype) for weight in matrices(model).values()}
        self.model: Any = copy.deepcopy(model, known)
        head = self.model.get_output_embeddings()
        if head.weight.dtype != dtype:  # tied: the embedding stays whole, the head is rounded
            head.weight = self._half(model.get_output_embeddings().weight, dtype)
        join(self.model)

    def refresh(self) -> None:
        """Round the model's current weights again."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)

    def _half(self, parameter: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        half = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        self._sources.append(parameter.detach())
        self._targets.append(half)
        return half
