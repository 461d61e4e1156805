"""Which positions of a batch hold the policy's tokens, and which sequences share a prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.types.batch import Batch
from posttrain.types.devices import send


class Spans(NamedTuple):
    """Of every sequence: where the policy's tokens begin and end, and whose prompt it has.

    ``first[b]`` is the index of the first token that the policy chose, so also the length of the
    prompt; ``end[b]`` is one beyond the last. ``owner[b]`` is the first sequence with the same
    prompt. A sequence without a chosen token has 0, 0 and itself.
    """

    first: list[int]
    end: list[int]
    owner: list[int]


def chosen_indices(batch: Batch) -> Tensor:
    """Indices where ``batch.mask.flatten()`` is True, without a device sync. Shapes: [B, T] → [M].

    >>> chosen_indices(Batch(tokens=torch.ones(1, 3).long(), mask=torch.tensor([[0, 1, 1]]).bool()))
    tensor([1, 2])
    """
    return send(batch.host.mask.flatten().nonzero()[:, 0], batch.tokens.device)


def spans(batch: Batch) -> Spans:
    """The spans of a batch; prompts are compared token by token, because groups may be wrong.

    >>> tokens = torch.tensor([[4, 5, 6], [4, 5, 7], [4, 9, 9]])
    >>> mask = torch.tensor([[False, False, True], [False, False, True], [False, True, True]])
    >>> spans(Batch(tokens=tokens, mask=mask))
    Spans(first=[2, 2, 1], end=[3, 3, 3], owner=[0, 0, 2])
    """
    chosen = batch.mask.any(dim=1)
    begins = batch.mask.long().argmax(dim=1)
    ends = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1, device=begins.device)).amax(dim=1)
    # One copy from the device for all three tensors.
    answers = torch.stack([chosen.long(), begins, ends]).tolist()
    active, first, end = answers
    rows = batch.tokens.cpu().contiguous().numpy()
    seen: dict[bytes, int] = {}
    owner = [
        seen.setdefault(rows[row, : first[row]].tobytes(), row) if active[row] else row
        for row in range(len(first))
    ]
    return Spans(first=first, end=end, owner=owner)
