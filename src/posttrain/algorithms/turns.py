"""Statistics of the policy's turns: an episode is one sequence, and its turns are parts of it."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.ops import keep
from posttrain.types import Batch


def turn_index(batch: Batch) -> Tensor:
    """Which turn of the policy each token is in, from 0; 0 too where it chose none. Shapes: [B, T].

    A batch without ``turns`` has one turn in each sequence.

    >>> mask, turns = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[-1, 0, -1, 1]])
    >>> turn_index(Batch.from_tensors(mask, turns=turns))
    tensor([[0, 0, 0, 1]])
    """
    if batch.turns is None:
        return torch.zeros_like(batch.mask, dtype=torch.long)
    return batch.turns.clamp_min(0)


def turn_sum(values: Tensor, batch: Batch) -> Tensor:
    """Sum over the tokens of each turn of the policy; K is the most turns of a sequence.

    Shapes: [B, T] → [B, K].

    >>> mask, turns = torch.tensor([[0, 1, 0, 1, 1]]), torch.tensor([[-1, 0, -1, 1, 1]])
    >>> batch = Batch.from_tensors(mask, turns=turns)
    >>> turn_sum(torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0]]), batch)
    tensor([[1., 5.]])
    """
    index = turn_index(batch)
    count = int(index.max()) + 1 if index.numel() else 1
    empty = values.new_zeros(len(values), count)
    return empty.scatter_add(1, index, keep(values, batch.mask))


def turn_ends(batch: Batch) -> Tensor:
    """[B, T] bool: True at the last token of each turn of the policy.

    >>> mask, turns = torch.tensor([[0, 1, 0, 1, 1]]), torch.tensor([[-1, 0, -1, 1, 1]])
    >>> turn_ends(Batch.from_tensors(mask, turns=turns))
    tensor([[False,  True, False, False,  True]])
    """
    place = batch.mask.cumsum(dim=1)
    length = turn_sum(torch.ones_like(place), batch)
    return batch.mask & (place == length.cumsum(dim=1).gather(1, turn_index(batch)))
