"""Linear layers that read the same input, computed in one product: fewer and larger kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers calls them


def join(model: nn.Module) -> None:
    """Compute siblings without a bias together, in place; for inference.

    Their parameters stay what they were, as slices of one tensor: what is written into them counts.
    """
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if _can_be_joined(layers):
                product = Product(layers)
                for place, name in enumerate(names):
                    setattr(module, name, _Sibling(product, place))


def _can_be_joined(layers: list[Any]) -> bool:
    """Whether these are linear layers and nothing more, without a bias and of one width."""
    if not all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
        return False
    return len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1


class Product(nn.Module):
    """One product for several layers: computed when the first is asked, handed out to the others.

    A sibling that is asked for other states than the first computes its own.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self._sizes = [layer.out_features for layer in layers]
        joined = torch.cat([layer.weight.detach() for layer in layers])
        for layer, part in zip(layers, joined.split(self._sizes), strict=True):
            layer.weight.data = part
        self.weight = nn.Parameter(joined, requires_grad=False)
        self._states: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def forward(self, states: Tensor, place: int) -> Tensor:
        """What the layer at this place makes of the states: [..., in] → [..., out]."""
        if place == 0:
            self._states = states
            self._parts = linear(states, self.weight).split(self._sizes, -1)
        if states is not self._states:
            return linear(states, self.weight.split(self._sizes)[place])
        found = self._parts[place]
        if place == len(self._sizes) - 1:  # hold no memory that nobody will ask for
            self._states, self._parts = None, ()
        return found


class _Sibling(nn.Module):
    """A layer that is a part of a product."""

    def __init__(self, product: Product, place: int) -> None:
        super().__init__()
        self.product = product
        self._place = place

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.product(states, self._place)
        return found
