"""The least time that sampling and learning can take on a device: bytes moved, operations done.

Both at the device's peak, which is measured by a large copy and a large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.models.cache import KeyShape


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a device can do in a second, and who says so."""

    bytes_per_second: float
    flops_per_second: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a decoder decides the work of a step; ``weights`` are the parameters it reads."""

    weights: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    width: int

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Of a model of transformers; embeddings that are no head are looked up, not read."""
        config, keys = model.config.get_text_config(decoder=True), KeyShape.of(model)
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        looked_up = 0 if table is head else table.numel()
        return cls(
            weights=sum(weight.numel() for weight in model.parameters()) - looked_up,
            layers=keys.layers,
            heads=config.num_attention_heads,
            key_heads=keys.heads,
            head_size=keys.size,
            vocabulary=config.vocab_size,
            width=config.hidden_size,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The work of one decode step, term by term."""

    weight_bytes: float
    key_bytes: float
    logit_bytes: float
    matrix_flops: float
    attention_flops: float

    @property
    def bytes(self) -> float:
        """All that is moved."""
        return self.weight_bytes + self.key_bytes + self.logit_bytes

    @property
    def flops(self) -> float:
        """All that is computed."""
        return self.matrix_flops + self.attention_flops

    def seconds(self, peak: Peak) -> float:
        """The roofline: whichever of the two takes longer at the device's peak."""
        return max(self.bytes / peak.bytes_per_second, self.flops / peak.flops_per_second)


def decode_step(shape: Shape, *, rows: float, length: float, item_bytes: int) -> DecodeStep:
    """The work of one step in which ``rows`` sequences of ``length`` tokens each get one more.

    With W weights, L layers, H heads, K key heads of size D, vocabulary V, b bytes a number:

    * bytes: ``W·b`` weights, ``2·L·K·D·length·rows·b`` keys and values, ``2·V·rows·b`` logits
      (written once, read once)
    * operations: ``2·W·rows`` matrix products, ``4·L·H·D·length·rows`` attention (queries with
      keys, shares with values, two operations each)

    Not counted: activations, the new key and value (1 / length of those read), sampling itself.
    Every row reads its own prompt; an engine that reads a group's prompt once moves less.

    >>> sizes = {"layers": 2, "heads": 4, "key_heads": 2, "head_size": 8, "width": 32}
    >>> shape = Shape(weights=1000, vocabulary=50, **sizes)
    >>> step = decode_step(shape, rows=3, length=10, item_bytes=2)
    >>> step.bytes, step.flops  # 2000 + 3840 + 600, and 6000 + 7680
    (6440, 13680)
    """
    keys = shape.layers * shape.key_heads * shape.head_size * length * rows
    return DecodeStep(
        weight_bytes=shape.weights * item_bytes,
        key_bytes=2 * keys * item_bytes,
        logit_bytes=2 * shape.vocabulary * rows * item_bytes,
        matrix_flops=2 * shape.weights * rows,
        attention_flops=4 * shape.layers * shape.heads * shape.head_size * length * rows,
    )


@dataclass(frozen=True, kw_only=True)
class Average:
    """Completions of any lengths as ``steps`` equal steps: as many bytes and operations."""

    steps: int
    rows: float
    length: float


def average(prompt_lengths: Sequence[int], lengths: Sequence[int]) -> Average:
    """The average step over completions of these ``lengths`` to prompts of those, one each.

    No engine can take fewer steps than the longest completion has tokens (the reading of prompts
    is counted as one of them: it reads the weights too). All work but that of reading the weights
    is proportional to rows · length, so averages lose nothing. Token t looks at p + t − 1 others:
    ``rows = Σ n / max n``, ``length = Σ (n·p + n·(n − 1)/2) / Σ n``.

    >>> average([4, 4], [1, 3])  # 4 + (4 + 5 + 6) over 4 tokens
    Average(steps=3, rows=1.3333333333333333, length=4.75)
    """
    tokens, steps = sum(lengths), max(lengths)
    seen = sum(n * p + n * (n - 1) / 2 for p, n in zip(prompt_lengths, lengths, strict=True))
    return Average(steps=steps, rows=tokens / steps, length=seen / tokens)


def learning_flops(shape: Shape, *, read: int, chosen: int, pairs: float) -> dict[str, float]:
    """Operations of a learning step: forward, and backward at twice as many.

    With W weights, of which D·V are the head's: layers ``6·(W − D·V)`` a token that is ``read``,
    head ``6·D·V`` a token that was ``chosen``, attention ``12·L·H·size`` for each of the ``pairs``
    of tokens of which one sees the other. Nothing counts that a learner computes twice: a prompt
    is read once for its group, and no layer reads the last token of a completion.

    >>> sizes = {"layers": 2, "heads": 4, "key_heads": 2, "head_size": 8, "width": 32}
    >>> shape = Shape(weights=1000, vocabulary=5, **sizes)
    >>> learning_flops(shape, read=20, chosen=18, pairs=86)
    {'layers': 100800, 'head': 17280, 'attention': 66048}
    """
    head = shape.width * shape.vocabulary
    return {
        "layers": 6 * (shape.weights - head) * read,
        "head": 6 * head * chosen,
        "attention": 12 * shape.layers * shape.heads * shape.head_size * pairs,
    }


def measured_peak(device: str, dtype: torch.dtype) -> Peak:
    """What a large copy and a large matrix product reach."""
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    big = device == "cuda"
    numbers = (1 << 28 if big else 1 << 26) // dtype.itemsize  # far beyond any cache
    source = torch.zeros(numbers, dtype=dtype, device=device)
    target = torch.empty_like(source)
    size = 8192 if big else 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    moved = 2 * source.numel() * dtype.itemsize / _best(lambda: target.copy_(source), device)
    done = 2 * size**3 / _best(lambda: left @ left, device)
    how = f"{name}, measured by a copy and a matrix product in {dtype}"
    return Peak(bytes_per_second=moved, flops_per_second=done, source=how)


def synchronize(device: str) -> None:
    """Wait until the device has done all it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def _best(work: Callable[[], object], device: str) -> float:
    """The shortest of several times, the first of which does not count."""
    times = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
