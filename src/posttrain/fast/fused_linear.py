"""Linear layers with the same input, fused into one product: fewer and larger kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.models import head
from posttrain.models.adapters import AdaptedLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers calls them
ALONE = (("o_proj",), ("down_proj",))  # fused with their own adapters


def fuse_linears(model: nn.Module) -> None:
    """Fuse the layers of :data:`SIBLINGS` that have no bias, in place; for inference.

    Their parameters become slices of one tensor, so that new values written into them are used. A
    weight with a second use is left alone: it cannot be a slice. Of layers with adapters, ``A`` is
    fused with the weights, and ``B`` of all siblings is one matrix.
    """
    used = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    for module in list(model.modules()):
        for names in (*SIBLINGS, *ALONE):
            layers: list[Any] = [getattr(module, name, None) for name in names]
            alike = all(map(_is_plain, layers)) and len(names) > 1
            alike = alike or all(map(_is_adapted, layers))
            if not alike or any(used[id(layer.weight)] > 1 for layer in layers):
                continue
            if len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
                product = FusedLinear(layers)
                for index, name in enumerate(names):
                    setattr(module, name, _Part(product, index))


def _is_plain(layer: Any) -> bool:
    """Whether this is a linear layer without a bias, and nothing more: no adapter, no hook."""
    if not isinstance(layer, nn.Linear) or "forward" in vars(layer):
        return False
    return head.is_plain(layer) and layer.bias is None


def _is_adapted(layer: Any) -> bool:
    """Whether this is such a layer with an adapter of ours, in the same type."""
    if type(layer) is not AdaptedLinear or layer.bias is not None or layer._forward_hooks:
        return False
    return {layer.adapter.A.dtype, layer.adapter.B.dtype} == {layer.weight.dtype}


class FusedLinear(nn.Module):
    """One product for several layers: computed when the first is called, kept for the others.

    A layer that is called with other states than the first computes its own product. Where a pass
    breaks off between the layers, their results are kept until the next pass.
    """

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self._sizes = [layer.out_features for layer in layers]
        adapters = [layer.adapter for layer in layers if isinstance(layer, AdaptedLinear)]
        rows = [layer.weight for layer in layers] + [adapter.A for adapter in adapters]
        fused = torch.cat([weight.detach() for weight in rows])
        for weight, part in zip(rows, fused.split([len(weight) for weight in rows]), strict=True):
            weight.data = part
        self.weight = nn.Parameter(fused, requires_grad=False)
        self._blocks = None
        if adapters:
            self._scale = adapters[0].scale
            self._blocks = nn.Parameter(
                torch.block_diag(*(adapter.B.detach() for adapter in adapters)), requires_grad=False
            )
            places = zip(adapters, _diagonal(adapters), strict=True)
            for adapter, (outs, ranks) in places:
                adapter.B.data = self._blocks.data[outs, ranks]
        self._states: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def forward(self, states: Tensor, index: int) -> Tensor:
        """The output of the layer of this index: [..., in] → [..., out]."""
        if index == 0:
            self._parts = self._products(states)
            self._states = states
        if states is not self._states:
            return self._products(states)[index]
        found = self._parts[index]
        if index == len(self._sizes) - 1:  # the last one: free the results
            self._states, self._parts = None, ()
        return found

    def _products(self, states: Tensor) -> tuple[Tensor, ...]:
        found = linear(states, self.weight)
        if self._blocks is not None:
            width = sum(self._sizes)
            flat = found.reshape(-1, found.shape[-1])
            added = torch.addmm(
                flat[:, :width], flat[:, width:], self._blocks.t(), alpha=self._scale
            )
            found = added.view(*found.shape[:-1], width)
        return found.split(self._sizes, -1)


def _diagonal(adapters: list[Any]) -> Iterator[tuple[slice, slice]]:
    """Where the B of each adapter is in a matrix of all."""
    row = column = 0
    for adapter in adapters:
        rows, columns = adapter.B.shape
        yield slice(row, row + rows), slice(column, column + columns)
        row, column = row + rows, column + columns


class _Part(nn.Module):
    """One of the fused layers."""

    def __init__(self, product: FusedLinear, index: int) -> None:
        super().__init__()
        self.product = product
        self._index = index

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.product(states, self._index)
        return found
