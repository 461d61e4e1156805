"""A model that is only asked: no gradient, no optimiser, and no more memory than it must take."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.adapters import adapted_layers


class Frozen:
    """A model kept in its own precision, and away from the device between two questions.

    ``dtype`` casts the weights (not the buffers: rotary frequencies stay exact); None leaves them.
    ``offload`` keeps them in main memory and brings them to the device for each :meth:`on_device`.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | None = None, offload: bool = False
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device
        self._offload = offload and self._device.type != "cpu"
        for weight in model.parameters():
            weight.data = weight.data.to(dtype or weight.dtype)
        self._rest()

    @classmethod
    def copy_of(
        cls, model: nn.Module, *, dtype: torch.dtype | None = None, offload: bool = False
    ) -> Frozen:
        """A frozen copy of the weights as they are now."""
        return cls(copy.deepcopy(model), dtype=dtype, offload=offload)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The model on its device, without gradient."""
        if self._offload:
            self._model.to(self._device)
        try:
            with torch.no_grad():
                yield self._model
        finally:
            self._rest()

    def weights(self) -> dict[str, Tensor]:
        """Its weights by name, where they are now; to be read, or filled in place."""
        return dict(self._model.named_parameters())

    def _rest(self) -> None:
        if self._offload:
            self._model.to("cpu")


class EarlierAdapter(Frozen):
    """A model with its adapters as they were when this was made: a reference without a copy.

    Their numbers are exchanged in place: nothing that holds the weights' addresses has to know.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._earlier = {n: w.detach().clone() for n, w in self._adapters().items()}

    def _adapters(self) -> dict[str, nn.Parameter]:
        return {name: w for name, w in self._model.named_parameters() if ".adapter." in name}

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The model with the earlier adapters, without gradient."""
        self._exchange()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            self._exchange()

    def weights(self) -> dict[str, Tensor]:
        """The earlier adapters by name; to be read, or filled in place."""
        return self._earlier

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._adapters().items():
            now = weight.detach().clone()
            weight.copy_(self._earlier[name])
            self._earlier[name].copy_(now)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """How a reference model is kept: the options of :class:`Frozen`."""

    dtype: torch.dtype | None = None
    offload: bool = False

    def of(self, model: nn.Module) -> Frozen:
        """The weights as they are now: a frozen copy of the model, or of its adapters alone."""
        if adapted_layers(model):
            return EarlierAdapter(model)
        return Frozen.copy_of(model, dtype=self.dtype, offload=self.offload)
