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


def micro_batches(
    batch: Batch, max_tokens: int, *, keep_groups: bool = False
) -> list[tuple[Tensor, Batch]]:
    """The batch as (rows, part) in parts of at most ``max_tokens`` tokens, padding counted.

    Sequences of like length go together and each part is trimmed to its longest, so little is
    spent on padding; a sequence longer than the budget is a part of its own. Sequences without an
    active token are left out: they have no loss. ``keep_groups`` never parts a group and keeps its
    order, for a loss that compares its members. Averaging is in ``weights``, made before this cut,
    so no choice of ``max_tokens`` can change the update.
    """
    if max_tokens < 1:
        raise ValueError(f"micro_batch_tokens: must be at least 1, got {max_tokens}")
    lengths = _lengths(batch).tolist()
    units: dict[int, list[int]] = {}
    names = batch.need("groups").tolist() if keep_groups else list(range(len(lengths)))
    for row in batch.active.any(dim=1).nonzero()[:, 0].tolist():
        units.setdefault(names[row], []).append(row)
    widths = {name: max(lengths[row] for row in rows) for name, rows in units.items()}
    parts: list[tuple[Tensor, Batch]] = []
    chosen: list[int] = []
    width = 0
    for name in sorted(units, key=lambda name: -widths[name]):
        if chosen and (len(chosen) + len(units[name])) * width > max_tokens:
            parts.append(_part(batch, chosen, width=width))
            chosen = []
        width = width if chosen else widths[name]
        chosen += units[name]
    if chosen:
        parts.append(_part(batch, chosen, width=width))
    return parts


def _part(batch: Batch, rows: list[int], *, width: int) -> tuple[Tensor, Batch]:
    index = torch.tensor(rows)
    return index, batch.select(index).trim(width)


def _lengths(batch: Batch) -> Tensor:
    """[B]: tokens up to the last real one."""
    real = batch.mask if batch.attention is None else batch.attention
    positions = torch.arange(1, real.shape[1] + 1, device=real.device)
    return (real * positions).amax(dim=1)
