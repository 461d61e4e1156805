"""A module that shares what it can with another, and holds its matrices in half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class HalfCopy:
    """A copy of a model for sampling under autocast, with every cast of a weight done beforehand.

    Autocast rounds the float32 matrices at every use; here they are kept rounded, so a step reads
    half the bytes and computes the very same. Embeddings, norms and biases are the model's own
    tensors. :meth:`refresh` brings the matrices up to date, on the device and in place.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        embeddings = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        known: dict[int, Any] = {}
        for parameter in model.parameters():
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            known[id(parameter)] = self._half(parameter, dtype) if matrix else parameter
        self.model: Any = copy.deepcopy(model, known)
        head = self.model.get_output_embeddings()
        if id(head.weight) in embeddings:  # tied: the embedding stays whole, the head is rounded
            head.weight = self._half(model.get_output_embeddings().weight, dtype)

    def refresh(self) -> None:
        """Round the model's current weights again."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)

    def _half(self, parameter: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        half = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        self._sources.append(parameter.detach())
        self._targets.append(half)
        return half
