"""Weights beside adapters in four bits (QLoRA), by bitsandbytes: dequantised where they are used.

A weight is kept as 4-bit numbers of the type NF4 and one float32 for each 64 of them, an eighth of
float32 and a bit more (Dettmers et al. 2023, arXiv:2305.14314). Sampling, learning, merging and the
reference all compute with the same dequantised numbers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from posttrain.models.adapters import AdaptedLinear

BLOCK = 64  # numbers that share a scale


class QuantizedLinear(AdaptedLinear):
    """An adapted layer whose own weight is kept in four bits."""

    def __init__(self, layer: AdaptedLinear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias, self.adapter = layer.bias, layer.adapter
        # One row for each block: kernels for CPUs read rows of another length wrongly.
        flat = layer.weight.detach().float().flatten()
        rows = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        found, state = _library().quantize_4bit(rows, blocksize=BLOCK, quant_type="nf4")
        # Parameters: copies of the model share them. Vectors: nothing casts those.
        self.packed = nn.Parameter(found.flatten(), requires_grad=False)
        self.scales = nn.Parameter(state.absmax, requires_grad=False)
        self.register_buffer("code", state.code, persistent=False)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers that it computes with, in float32: [out, in]."""
        return self.dequantized(torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight in a type: [out, in]."""
        library = _library()
        state = library.QuantState(
            absmax=self.scales,
            shape=torch.Size((len(self.scales), BLOCK)),
            dtype=dtype,
            blocksize=BLOCK,
            code=self.code,
            quant_type="nf4",
        )
        found: Tensor = library.dequantize_4bit(self.packed.view(-1, 1), state)
        size = self.out_features * self.in_features
        return found.flatten()[:size].view(self.out_features, self.in_features)

    def product(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """``W x + b``; for the gradient the weight is dequantised again, not kept."""
        found: Tensor = _Product.apply(states, self)
        return found if bias is None else found + bias


class _Product(torch.autograd.Function):
    """``W x`` of a quantised layer. Shapes: [..., in] → [..., out]."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        states, layer = given
        ctx.layer = layer
        return linear(states, layer.dequantized(states.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


def check_quantize(kind: str) -> None:
    """Raise where a base in four bits is asked for and the package that keeps it is not there."""
    if kind != "none":
        _library()


def _library() -> Any:
    # It advises CPUs to install kernels of its own, which nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").disabled = True
    try:
        import bitsandbytes.functional as library
    except ImportError as error:
        raise ValueError(
            "adapter.quantize: needs the package bitsandbytes (pip install 'posttrain[qlora]'); "
            f'install it, or set adapter.quantize to "none" ({error})'
        ) from error
    return library
