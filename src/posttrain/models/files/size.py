"""Whether a model fits this machine, told from its config before any memory is taken."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

MAX_PARTS = 2000  # layers, heads or experts: the largest known models have a few hundred
_PARTS = re.compile(r"(layers?|blocks?|heads?|experts?|depth)$")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_parts(values: Mapping[str, Any], *, where: str) -> None:
    """Refuse a config that asks for more layers than any model has: a list is made of them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_parts(value, where=where)
        elif isinstance(value, int) and value > MAX_PARTS and _PARTS.search(name):
            raise ValueError(
                f"model: {where} asks for {name} = {value:,}, and at most {MAX_PARTS:,} are built: "
                "the largest known models have a few hundred; fix it there, or copy the file again"
            )


def check_size(config: Any, *, where: str, dtype: torch.dtype) -> None:
    """Refuse a config whose weights alone, counted low, are more than the machine's memory."""
    found = config.get_text_config()
    weights, memory = fewest_weights(found), machine_memory()
    if weights * dtype.itemsize <= memory:
        return
    kind = str(dtype).removeprefix("torch.")
    raise ValueError(
        f"model: {where} asks for {found.num_hidden_layers:,} layers of hidden_size "
        f"{found.hidden_size:,} and a vocab_size of {found.vocab_size:,}: at least {weights:,} "
        f"weights, which take {_size(weights * dtype.itemsize)} as {kind}, and this machine has "
        f"{_size(memory)} of memory; fix it there, or take a smaller model"
    )


def fewest_weights(config: Any) -> int:
    """The weights that a decoder of such a config has at least, whatever else is in its layers.

    ``vocab·hidden + layers·hidden·(heads·head_dim + 2·intermediate)``; of experts, which may be in
    every other layer alone, ``experts·intermediate`` in the place of the last.

    >>> from transformers import LlamaConfig
    >>> fewest_weights(LlamaConfig(vocab_size=10, hidden_size=4, num_hidden_layers=2,
    ...     num_attention_heads=2, intermediate_size=8))
    200
    """

    def number(*names: str) -> int:
        values = [getattr(config, name, None) for name in names]
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), 0)

    hidden, layers = number("hidden_size"), number("num_hidden_layers")
    heads = number("num_attention_heads")
    queries = heads * number("head_dim") or hidden
    experts = number("num_local_experts", "num_experts", "n_routed_experts")
    wide = number("intermediate_size", "ffn_dim", "n_inner") or 4 * number("n_embd")
    each = experts * (number("moe_intermediate_size") or wide) if experts else 2 * wide
    tables = number("vocab_size") + number("n_positions")  # GPT-2's positions are learned
    return tables * hidden + layers * hidden * (queries + each)


def machine_memory() -> int:
    """The memory of this machine in bytes, or of the control group that this process is in."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _GROUP_LIMIT.read_text(encoding="ascii").strip() if _GROUP_LIMIT.is_file() else ""
    return min(memory, int(limit)) if limit.isdigit() else memory


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
