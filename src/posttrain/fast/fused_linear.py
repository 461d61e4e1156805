"""Linear layers with the same input, fused into one product: fewer and larger kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from posttrain.fast.linear_products import QuickAdapted
from posttrain.models import head
from posttrain.models.adapter_group import AdapterChoice
from posttrain.models.adapters import AdaptedLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers calls them
ALONE = (("o_proj",), ("down_proj",))  # fused with their own adapters


def fuse_linears(model: nn.Module, *, leave: Collection[int] = ()) -> None:
    """Fuse the layers of :data:`SIBLINGS`, all with a bias or all without, in place; for inference.

    Their parameters become slices of one tensor, so that new values written into them are used. A
    weight with a second use is left alone: it cannot be a slice. Of layers with adapters, ``A`` is
    fused with the weights, and ``B`` of all siblings is one matrix. Layers whose weight's id is in
    ``leave`` stay as they are. Several adapters side by side
    (:mod:`posttrain.models.adapter_group`) are as one of many times the rank.
    """
    used = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    for module in list(model.modules()):
        for names in (*SIBLINGS, *ALONE):
            layers: list[Any] = [getattr(module, name, None) for name in names]
            alike = all(map(_is_plain, layers)) and len(names) > 1
            alike = alike or all(map(_is_adapted, layers))
            if not alike or any(used[id(layer.weight)] > 1 for layer in layers):
                continue
            if any(id(layer.weight) in leave for layer in layers):
                continue
            if len({(one.in_features, one.weight.dtype, one.bias is None) for one in layers}) == 1:
                product = FusedLinear(layers)
                for index, name in enumerate(names):
                    setattr(module, name, _Part(product, index))


def _is_plain(layer: Any) -> bool:
    """Whether this is a linear layer of one type, and nothing more: no adapter, no hook."""
    if not isinstance(layer, nn.Linear) or "forward" in vars(layer):
        return False
    return head.is_plain(layer) and _bias_fits(layer)


def _bias_fits(layer: nn.Linear) -> bool:
    return layer.bias is None or layer.bias.dtype == layer.weight.dtype


def _is_adapted(layer: Any) -> bool:
    """Whether this is such a layer with an adapter of ours, in the same type."""
    if (
        type(layer) not in (AdaptedLinear, QuickAdapted)
        or not _bias_fits(layer)
        or layer._forward_hooks
    ):
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
        self.weight = _joined(rows)
        self.bias = None
        if layers[0].bias is not None:  # A has none
            self.bias = _joined([layer.bias for layer in layers], size=len(self.weight))
        self._blocks = None
        self._choice: AdapterChoice | None = None
        if adapters:
            self._choice = getattr(adapters[0], "choice", None)
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
        found = linear(states, self.weight, self.bias)
        if self._blocks is not None:
            width = sum(self._sizes)
            flat = found.reshape(-1, found.shape[-1])
            low = flat[:, width:]
            if self._choice is not None:
                low = self._choice.kept(low, siblings=len(self._sizes))
            added = torch.addmm(flat[:, :width], low, self._blocks.t(), alpha=self._scale)
            found = added.view(*found.shape[:-1], width)
        return found.split(self._sizes, -1)


def _joined(parts: list[Any], *, size: int = 0) -> nn.Parameter:
    """One tensor of which these become slices, followed by zeros up to ``size`` rows."""
    given = torch.cat([part.detach() for part in parts])
    joined = given.new_zeros(max(size, len(given)), *given.shape[1:])
    joined[: len(given)] = given
    for part, own in zip(
        parts, joined.split([*map(len, parts), len(joined) - len(given)]), strict=False
    ):
        part.data = own
    return nn.Parameter(joined, requires_grad=False)


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
