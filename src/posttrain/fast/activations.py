"""Activation checkpointing: a layer keeps only its input, and is computed again for the gradient.

Memory for about a third more time (Chen et al. 2016, arXiv:1604.06174). transformers' own switch
acts on models in training mode only and drops the key-value cache there; our policies stay in
evaluation mode (no dropout) and also sample. Here a layer recomputes exactly when a gradient is
wanted and there is no cache.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.fast.attention import interface
from posttrain.fast.linear_products import PlainInPickles

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def checkpoint_activations(model: nn.Module, *, enabled: bool = True) -> None:
    """Have every layer of a transformers model recompute its activations, or no longer.

    Log-probs and gradients stay the same bit for bit where a layer, computed twice, gives the same
    bits. Asking twice is the same as asking once; a copy of the model does as the model does.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if enabled and not layers:
        raise ValueError(
            f"checkpoint_activations: {type(model).__name__} has no layers that transformers knows "
            "how to compute again; set it to false and use smaller micro-batches"
        )
    config = getattr(model, "config", None)
    for layer in layers:
        known, kind = isinstance(layer, _Recomputed), cast(Any, type(layer))
        if enabled and not known:
            layer._posttrain_owner = SimpleNamespace(config=config)
            layer.__class__ = _recomputed(kind)
        elif known and not enabled:
            layer.__class__ = kind.plain


class _Recomputed(PlainInPickles):
    """Mixed into the class of a layer, so that a deep copy of the model has it too."""

    _posttrain_owner: SimpleNamespace

    def forward(self, *inputs: Any, **options: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        cached = any(options.get(name) is not None for name in _CACHES)
        if cached or not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # without dropout no random number is drawn
            context_fn=functools.partial(_contexts, self._posttrain_owner),
            **options,
        )


@functools.cache
def _recomputed(kind: type) -> type:
    known = {"__module__": kind.__module__, "plain": kind}
    return type(kind.__name__, (_Recomputed, kind), known)


def _contexts(owner: SimpleNamespace) -> tuple[Any, Any]:
    """Contexts of the first computation and of the second, which must attend as the first did."""
    own = getattr(interface._active, "attention", None)
    if own is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), interface.attending(cast(Any, owner), own)
