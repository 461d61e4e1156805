"""Compilation of a decoder's layers: one layer's kernels serve them all, so the wait is short."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.models.attention import keep_out_of_compilation, replaceable


def compile_layers(model: Any) -> None:
    """Let PyTorch compile the layers of a model, in place; a model without such is left alone.

    Attention is ours and stays out (:mod:`posttrain.models.attention`); what is fused is the long
    chain of norms, positions, casts and activations around the matrix products. All layers have the
    same code and shapes, so it is compiled once, for any number of tokens.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if isinstance(layers, nn.ModuleList):
        keep_out_of_compilation()
        replaceable(model)  # asked now: what is compiled should see nothing but the real work
        for layer in layers:
            layer.compile(dynamic=True)
