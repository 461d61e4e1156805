"""One step of a decoder with a key-value cache: all that an engine needs of transformers' caches.

So the engine itself knows tensors alone.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from posttrain.models import head

KEPT_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}


class UnknownMemoryError(ValueError):
    """A model that remembers more than keys and values, or places them by itself: ``has`` what."""

    def __init__(self, model: str, has: str) -> None:
        self.has = has
        super().__init__(
            f"model {model}: it has {has}, and the native engine knows decoders with explicit "
            "positions and plain keys and values only"
        )


class PreallocatedLayer(DynamicLayer):
    """Keys and values ``[N, heads, T, size]`` of one layer, in buffers with columns to spare.

    transformers' own layer concatenates, so that every token copies the whole cache. This one
    writes the new columns in place and shows the used part as a view.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._allocated: list[Tensor] = []  # keys and values, [N, heads, T or more, size]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; give back those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        total = used + key_states.shape[-2]
        new = [_as_attended(states) for states in (key_states, value_states)]
        if not self._allocated or self._allocated[0].shape[-2] < total:
            old = (self.keys, self.values)
            self._allocated = [
                _wider(*pair, length=_with_spare(total)) for pair in zip(old, new, strict=True)
            ]
        for buffer, states in zip(self._allocated, new, strict=True):
            buffer[:, :, used:total] = states
        self.keys, self.values = (buffer[:, :, :total] for buffer in self._allocated)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        if self._allocated:
            used = self.get_seq_length()
            self._allocated = [buffer.index_select(0, indices) for buffer in self._allocated]
            self.keys, self.values = (buffer[:, :, :used] for buffer in self._allocated)


def _as_attended(states: Tensor) -> Tensor:
    """The states cast as autocast would for attention: once, and not at every step."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        return states.to(torch.get_autocast_dtype(kind))
    return states


def _with_spare(length: int) -> int:
    """A quarter more: the buffer seldom grows, and wastes little memory."""
    return length + max(8, length // 4)


def _wider(old: Tensor, like: Tensor, *, length: int) -> Tensor:
    """A buffer of ``length`` columns that begins with those of ``old``."""
    buffer = like.new_empty(*like.shape[:2], length, like.shape[-1])
    if old.numel():
        buffer[:, :, : old.shape[-2]] = old
    return buffer


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache, or an error if the model remembers more than keys and values."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    cache = DynamicCache(config=config)
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    strange = sorted(kinds - KEPT_BY_POSITION)
    strange += [type(layer).__name__ for layer in cache.layers if type(layer) not in known]
    strange += ["an encoder"] if getattr(config, "is_encoder_decoder", False) else []
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        strange.append("positions that it counts itself")
    if strange:
        raise UnknownMemoryError(type(model).__name__, strange[0])
    cache.layers = [
        PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep these rows of the cache, in this order; a row may be named more than once."""
    cache.batch_select_indices(rows)


def next_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    cache: Cache,
    positions: Tensor,
    attention: Tensor | None,
) -> Tensor:
    """Read tokens into the cache; the logits of what follows the last column, as trained on.

    ``attention`` is None where nothing is padding. Shapes: tokens and positions [N, T], attention
    [N, all tokens so far] → [N, V]; float32, or float64 for such a model.
    """
    inputs = {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": attention,
        "past_key_values": cache,
        "use_cache": True,
    }
    if head.logits_are_head_of_states(model, tokens):
        return head.project(model, model.base_model(**inputs).last_hidden_state[:, -1])
    return model(**inputs).logits[:, -1]


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens a sequence of ``model`` may have; None where its configuration sets none."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


@dataclass(frozen=True, kw_only=True)
class KeyShape:
    """The shape of a model's keys: layers, key heads, and the size of each."""

    layers: int
    heads: int
    size: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> KeyShape:
        """As the model's configuration has it."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.heads * self.size * dtype.itemsize


def bytes_per_sequence(
    model: PreTrainedModel, *, prompt_tokens: int, new_tokens: int, dtype: torch.dtype
) -> int:
    """A generous estimate of the memory that one sequence takes while it is decoded.

    Keys and values of all its tokens, the widest activations of its prompt in one layer, and the
    rows of vocabulary size that sampling sorts and sums (about eight in float32).
    """
    config = model.config.get_text_config()
    width = getattr(config, "hidden_size", None) or 4096
    # Layers of more than one kind have a configuration each.
    layers = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    inner = max(getattr(layer, "intermediate_size", None) or 4 * width for layer in layers)
    states = sum(_key_and_value(layer, width) for layer in layers)
    kept = _with_spare(prompt_tokens + new_tokens) * states
    passing = prompt_tokens * (6 * width + 3 * inner)
    return (kept + passing) * dtype.itemsize + 32 * config.vocab_size


def _key_and_value(config: Any, width: int) -> int:
    """Numbers that a layer keeps of a token."""
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or width // heads
    return 2 * int(size * (getattr(config, "num_key_value_heads", None) or heads))
