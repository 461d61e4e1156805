"""Compilation of a decoder's layers: one layer's kernels serve them all, so the wait is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posttrain.fast.attention.interface import keep_out_of_compilation
from posttrain.fast.attention.replaceable import replaceable
from posttrain.fast.kv_slots import fits_slots
from posttrain.fast.packed_states import can_be_packed
from posttrain.models.head import logits_are_head_of_states
from posttrain.types.ways import Support


def compile_layers(model: Any) -> None:
    """Let PyTorch compile the layers of a model, in place; a model without such is left alone.

    Attention is ours and stays out (:mod:`posttrain.fast.attention`); what is fused is the long
    chain of norms, positions, casts and activations around the matrix products. All layers have the
    same code and shapes, so it is compiled once, for any number of tokens.
    """
    if compilable(model):
        keep_out_of_compilation()
        ask_once(model)
        for layer in _layers(model):
            layer.compile(dynamic=True)


def compilable(model: Any) -> Support:
    """Whether the layers of a model are where :func:`compile_layers` looks for them."""
    found = len(_layers(model)) > 0
    return Support("" if found else "its layers are not in a list called layers")


def is_compiled(model: Any) -> bool:
    """Whether the layers of a model are compiled, or will be at their first call."""
    return any(layer._compiled_call_impl is not None for layer in _layers(model))


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Inside, compiled layers run as they are written: for calls whose shapes and caches vary.

    Each such call would be compiled anew until PyTorch gives up on the layers for good.
    """
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _layers(model: Any) -> nn.ModuleList:
    trunk = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(trunk, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def ask_once(model: Any) -> None:
    """Run and cache the capability probes (packing, slots, head) first.

    After compile() each probe would trigger a compilation. Copies of the model keep the answers.
    """
    if model.get_output_embeddings() is not None:
        logits_are_head_of_states(model, torch.arange(8, device=model.device)[None])
    if replaceable(model):
        can_be_packed(model.get_decoder())
        fits_slots(model)
