"""A copy of a model for sampling, with its matrices cast to half precision beforehand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from posttrain.fast.fused_linear import fuse_linears


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
    the bytes and computes the same (fused layers may sum in another order).
    Embeddings, norms and biases are the model's own tensors. :meth:`refresh` brings the matrices up
    to date, on the device and in place.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        known: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        known |= {id(weight): self._cast(weight, dtype) for weight in matrices(model).values()}
        self.model: Any = copy.deepcopy(model, known)
        head = self.model.get_output_embeddings()
        if head.weight.dtype != dtype:  # tied weights: only the head is cast
            head.weight = self._cast(model.get_output_embeddings().weight, dtype)
        fuse_linears(self.model)

    def refresh(self) -> None:
        """Cast the model's current weights again."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)

    def _cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        self._sources.append(parameter.detach())
        self._targets.append(cast)
        return cast
