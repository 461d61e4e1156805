"""Linear layers with the same input, fused into one product: fewer and larger kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.models import head

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers calls them


def fuse_linears(model: nn.Module) -> None:
    """Fuse the layers of :data:`SIBLINGS` that have no bias, in place; for inference.

    Their parameters become slices of one tensor, so that new values written into them are used. A
    weight with a second use is left alone: it cannot be a slice.
    """
    used = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            plain = all(_is_plain(layer) and used[id(layer.weight)] == 1 for layer in layers)
            if plain and len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
                product = FusedLinear(layers)
                for index, name in enumerate(names):
                    setattr(module, name, _Part(product, index))


def _is_plain(layer: Any) -> bool:
    """Whether this is a linear layer without a bias, and nothing more: no adapter, no hook."""
    if not isinstance(layer, nn.Linear) or "forward" in vars(layer):
        return False
    return head.is_plain(layer) and layer.bias is None


class FusedLinear(nn.Module):
    """One product for several layers: computed when the first is called, kept for the others.

    A layer that is called with other states than the first computes its own product. Where a pass
    breaks off between the layers, their results are kept until the next pass.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self._sizes = [layer.out_features for layer in layers]
        fused = torch.cat([layer.weight.detach() for layer in layers])
        for layer, part in zip(layers, fused.split(self._sizes), strict=True):
            layer.weight.data = part
        self.weight = nn.Parameter(fused, requires_grad=False)
        self._states: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def forward(self, states: Tensor, index: int) -> Tensor:
        """The output of the layer of this index: [..., in] → [..., out]."""
        if index == 0:
            self._parts = linear(states, self.weight).split(self._sizes, -1)
            self._states = states
        if states is not self._states:
            return linear(states, self.weight.split(self._sizes)[index])
        found = self._parts[index]
        if index == len(self._sizes) - 1:  # the last one: free the results
            self._states, self._parts = None, ()
        return found


class _Part(nn.Module):
    """One of the fused layers."""

    def __init__(self, product: FusedLinear, index: int) -> None:
        super().__init__()
        self.product = product
        self._index = index

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.product(states, self._index)
        return found
