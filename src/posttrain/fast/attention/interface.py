"""A decoder with the standard attention interface calls a function of ours in place of its own.

It gets the queries, keys and values of a layer. All else (projections, norms, positions, experts)
stays the model's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "posttrain"
_active = threading.local()


class Attention(Protocol):
    """What a forward pass does in place of the model's own attention."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Mix values: [N, H, T, D], [N, K, T, D], [N, K, T, D] → [N, T, H, D]; H = K · groups.

        ``window`` is how many of the last tokens a token sees, itself included; None: all.
        """
        ...


@contextmanager
def attending(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Inside, the model attends through ``attention``. Give it no mask and no cache."""
    before, _active.attention = getattr(_active, "attention", None), attention
    try:
        with implementation(model, _NAME):
            yield
    finally:
        _active.attention = before


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the model attends through the function of this name in transformers' interface."""
    config: Any = model.config.get_text_config(decoder=True)
    own, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = own


def replaced_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls."""
    others = {"soft-capped scores": softcap, "sinks": s_aux, "a mask of its own": attention_mask}
    for name, given in others.items():
        if given is not None:
            raise NotImplementedError(f"attention with {name}")
    mixed = _active.attention.attend(
        query,
        key,
        value,
        layer=module.layer_idx,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return mixed, None


AttentionInterface.register(_NAME, replaced_attention)


def keep_out_of_compilation() -> None:
    """Keep attention out of compiled layers. Only where layers are compiled: it slows each call."""
    AttentionInterface.register(_NAME, torch.compiler.disable(replaced_attention))


class Causal:
    """Every token sees itself and those before it in its row, as in the models' own attention."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Plain attention over rows."""
        key, value = (for_all_heads(states, query) for states in (key, value))
        mask, length = None, query.shape[2]
        if window is not None and window < length:
            index = torch.arange(length, device=query.device)
            ago = index[:, None] - index
            mask = (ago >= 0) & (ago < window)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return mixed.transpose(1, 2)


def for_all_heads(states: Tensor, query: Tensor) -> Tensor:
    """One key or value for each query head. Shapes: [N, K, T, D] → [N, H, T, D]."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)
