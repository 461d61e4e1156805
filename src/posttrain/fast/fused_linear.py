"""Linear layers that read the same input, computed in one product: fewer and larger kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.models import head

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers calls them


def join(model: nn.Module) -> None:
    """Compute siblings without a bias together, in place; for inference.

    Their parameters stay what they were, as slices of one tensor: what is written into them counts.
    So a weight that has a second use is left alone.
    """
    used = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            plain = all(_is_plain(layer) and used[id(layer.weight)] == 1 for layer in layers)
            if plain and len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
                product = Product(layers)
                for place, name in enumerate(names):
                    setattr(module, name, _Sibling(product, place))


def _is_plain(layer: Any) -> bool:
    """Whether this is a linear layer without a bias, and nothing more: no adapter, no hook."""
    if not isinstance(layer, nn.Linear) or "forward" in vars(layer):
        return False
    return head.is_plain(layer) and layer.bias is None


class Product(nn.Module):
    """One product for several layers: computed when the first is asked, handed out to the others.

    A sibling that is asked for other states than the first computes its own. Where a pass breaks
    off between siblings, what they would have got is held until the next one.
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
            self._parts = linear(states, self.weight).split(self._sizes, -1)
            self._states = states
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
