"""Compilation of a decoder's layers: one layer's kernels serve them all, so the wait is short."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from posttrain.models.attention import keep_out_of_compilation
from posttrain.models.head import logits_are_head_of_states
from posttrain.models.replaceable import replaceable
from posttrain.models.slots import fits_slots
from posttrain.models.states import can_be_packed


def compile_layers(model: Any) -> None:
    """Let PyTorch compile the layers of a model, in place; a model without such is left alone.

    Attention is ours and stays out (:mod:`posttrain.models.attention`); what is fused is the long
    chain of norms, positions, casts and activations around the matrix products. All layers have the
    same code and shapes, so it is compiled once, for any number of tokens.
    """
    trunk = model.get_decoder()
    layers = getattr(trunk, "layers", None)
    if isinstance(layers, nn.ModuleList):
        keep_out_of_compilation()
        ask_once(model)
        for layer in layers:
            layer.compile(dynamic=True)


def ask_once(model: Any) -> None:
    """Ask now what is asked once of every model: each answer would be compiled for itself.

    The answers go with copies of the model.
    """
    if model.get_output_embeddings() is not None:
        logits_are_head_of_states(model, torch.arange(8, device=model.device)[None])
    if replaceable(model):
        can_be_packed(model.get_decoder())
        fits_slots(model)
