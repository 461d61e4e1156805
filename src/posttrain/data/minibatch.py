"""Cutting a batch: mini-batches are optimiser steps, micro-batches are only what fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.types import Batch
from posttrain.types.batch import TokenSpans, spans

# Splitting the completions of a prompt over two micro-batches computes the prompt twice. It is done
# only where the completions moved have at least this many times the tokens of the prompt.
MIN_COMPLETION_TO_PROMPT = 8


def minibatch_rows(
    batch: Batch, count: int, *, epochs: int = 1, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """The rows of ``count`` equal parts of the batch, ``epochs`` times, shuffled anew each time.

    One part is the batch itself, in its own order. Sequences that do not divide evenly go to the
    first parts, one each.
    """
    size = batch.tokens.shape[0]
    if not 1 <= count <= size:
        raise ValueError(f"minibatches: must be between 1 and the {size} sequences, got {count}")
    for _ in range(epochs):
        if count == 1:
            yield torch.arange(size)
        else:
            yield from torch.randperm(size, generator=generator).tensor_split(count)


def micro_batches(
    batch: Batch, max_tokens: int, *, keep_groups: bool = False, share_prompts: bool = False
) -> list[tuple[Tensor, Batch]]:
    """The batch as (rows, part) in parts of at most ``max_tokens`` tokens, padding counted.

    Sequences of like length go together and each part is trimmed to its longest, so little is
    spent on padding; a sequence longer than the budget is a part of its own. Sequences without an
    active token are left out: they have no loss. ``keep_groups`` never splits a group and keeps its
    order, for a loss that compares its members. ``share_prompts`` is for a forward pass that
    computes no padding, and equal prompts of a micro-batch once: tokens are counted accordingly,
    and sequences with the same prompt are split only to fill a micro-batch with completions much
    longer than the prompt.
    Averaging is in ``weights``, made before this cut, so no choice of ``max_tokens`` can change the
    update.
    """
    if max_tokens < 1:
        raise ValueError(f"micro_batch_tokens: must be at least 1, got {max_tokens}")
    lengths = _lengths(batch).tolist()
    found = spans(batch) if share_prompts else None
    names = list(range(len(lengths))) if found is None else found.owner
    if keep_groups:
        names = batch.need("groups").tolist()
    units: dict[int, list[int]] = {}
    for row in batch.active.any(dim=1).nonzero()[:, 0].tolist():
        units.setdefault(names[row], []).append(row)
    parts = cut(
        list(units.values()), lengths, found=found, max_tokens=max_tokens, keep_groups=keep_groups
    )
    return [_part(batch, rows, width=max(lengths[row] for row in rows)) for rows in parts]


def cut(
    pieces: list[list[int]],
    lengths: Sequence[int],
    *,
    found: TokenSpans | None,
    max_tokens: int,
    keep_groups: bool = False,
) -> list[list[int]]:
    """The rows of each micro-batch, from rows that belong together and the length of every row."""
    if found is not None and not keep_groups:
        pieces = [
            piece for rows in pieces for piece in _fitting(rows, found, max_tokens=max_tokens)
        ]
    parts: list[list[int]] = []
    used = width = 0
    for piece in sorted(pieces, key=lambda rows: -max(lengths[row] for row in rows)):
        cost = len(piece) * width if found is None else _computed(piece, found)
        rest = piece
        if parts and used + cost <= max_tokens:
            rest = []
        elif parts and found is not None and not keep_groups:
            rest = _rest(piece, found, capacity=max_tokens - used)
        if len(rest) < len(piece):
            parts[-1] += [row for row in piece if row not in rest]
            used += cost
        if rest:
            width = max(lengths[row] for row in rest)
            used = len(rest) * width if found is None else _computed(rest, found)
            parts.append(rest)
    return parts


def _computed(rows: list[int], found: TokenSpans) -> int:
    """Tokens that these rows cost where equal prompts are computed once."""
    prompts = {found.owner[row]: found.first[row] for row in rows}
    return sum(prompts.values()) + sum(found.end[row] - found.first[row] for row in rows)


def _fitting(rows: list[int], found: TokenSpans, *, max_tokens: int) -> list[list[int]]:
    """Rows of one prompt in pieces of at most ``max_tokens`` with the prompt, longest first."""
    pieces: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -found.end[row]):
        if pieces and _computed([*pieces[-1], row], found) <= max_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def _rest(rows: list[int], found: TokenSpans, *, capacity: int) -> list[int]:
    """The rows of one prompt that do not fit into ``capacity`` tokens; all, if too few would fit.

    >>> found = TokenSpans(first=[2, 2, 2], end=[20, 20, 20], owner=[0, 0, 0])
    >>> _rest([0, 1, 2], found, capacity=40), _rest([0, 1, 2], found, capacity=19)
    ([2], [0, 1, 2])
    """
    prompt = found.first[rows[0]]
    rest, used = [], prompt
    for row in rows:
        size = found.end[row] - found.first[row]
        if used + size <= capacity:
            used += size
        else:
            rest.append(row)
    return rest if used - prompt >= MIN_COMPLETION_TO_PROMPT * prompt else rows


def _part(batch: Batch, rows: list[int], *, width: int) -> tuple[Tensor, Batch]:
    index = torch.tensor(rows)
    return index, batch.select(index).trim(width)


def _lengths(batch: Batch) -> Tensor:
    """[B]: tokens up to the last real one."""
    real = batch.mask if batch.attention is None else batch.attention
    positions = torch.arange(1, real.shape[1] + 1, device=real.device)
    return (real * positions).amax(dim=1)
