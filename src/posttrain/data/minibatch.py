"""Cutting a batch: mini-batches are optimiser steps, micro-batches are only what fits in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posttrain.types import Batch


def minibatches(
    batch: Batch, count: int, *, epochs: int = 1, generator: torch.Generator | None = None
) -> Iterator[Batch]:
    """``count`` equal parts of the batch, ``epochs`` times over, shuffled anew each time.

    One part is the batch itself, in its own order. Sequences that do not divide evenly go to the
    first parts, one each.

    >>> [part.rewards.tolist() for part in minibatches(Batch.from_rewards([1.0, 2.0]), 1)]
    [[1.0, 2.0]]
    """
    size = batch.tokens.shape[0]
    if not 1 <= count <= size:
        raise ValueError(f"minibatches: must be between 1 and the {size} sequences, got {count}")
    for _ in range(epochs):
        if count == 1:
            yield batch
            continue
        for rows in torch.randperm(size, generator=generator).tensor_split(count):
            yield batch.select(rows)


def micro_batches(batch: Batch, max_tokens: int) -> list[tuple[Tensor, Batch]]:
    """The batch as (rows, part) in parts of at most ``max_tokens`` tokens, padding counted.

    Sequences of like length go together and each part is trimmed to its longest, so little is
    spent on padding; a sequence longer than the budget is a part of its own. Sequences without an
    active token are left out: they have no loss. Averaging is in ``weights``, made before this
    cut, so no choice of ``max_tokens`` can change the update.
    """
    if max_tokens < 1:
        raise ValueError(f"micro_batch_tokens: must be at least 1, got {max_tokens}")
    lengths = _lengths(batch)
    rows = batch.active.any(dim=1).nonzero()[:, 0]
    order = rows[lengths[rows].argsort(stable=True, descending=True)]
    parts: list[tuple[Tensor, Batch]] = []
    start = 0
    while start < len(order):
        width = int(lengths[order[start]])
        chosen = order[start : start + max(1, max_tokens // width)]
        parts.append((chosen, batch.select(chosen).trim(width)))
        start += len(chosen)
    return parts


def _lengths(batch: Batch) -> Tensor:
    """[B]: tokens up to the last real one."""
    real = batch.mask if batch.attention is None else batch.attention
    positions = torch.arange(1, real.shape[1] + 1, device=real.device)
    return (real * positions).amax(dim=1)
