"""The tokens of a batch in one row: no padding, and a prompt that several share only once.

``[shared prompts | whole sequences | completions]``. A sequence that shares its prompt with no
other stays whole; the completions of the others come last, sorted by prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.types import Batch
from posttrain.types.batch import TokenSpans


@dataclass(frozen=True, kw_only=True)
class Packing:
    """N tokens in one row, and which sequences they belong to.

    ``source`` [N] is the index of each token in ``batch.tokens.flatten()``, ``positions`` [N] its
    position in its own sequence. ``before`` [M] is the packed index of the state before each chosen
    token, in the order of ``batch.tokens[batch.mask]``. ``prompts`` are the lengths of the shared
    prompts, ``wholes`` those of the sequences that stay whole, ``completions`` those of the
    completions of each shared prompt.
    """

    source: Tensor
    positions: Tensor
    before: Tensor
    prompts: list[int]
    wholes: list[int]
    completions: list[list[int]]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        together = (
            prompt + max(rest) for prompt, rest in zip(self.prompts, self.completions, strict=True)
        )
        return max((*together, *self.wholes))


def pack(batch: Batch, found: TokenSpans) -> Packing:
    """Pack what a forward pass must compute: no token after which none is chosen.

    At least one token of the batch must be chosen, and none of them the first of its sequence.
    """
    siblings: dict[int, list[int]] = {}
    for row, end in enumerate(found.end):
        if end > 0:
            siblings.setdefault(found.owner[row], []).append(row)
    # The state after the last chosen token is not needed: a completion of one token adds nothing.
    rest = {
        owner: [row for row in rows if found.end[row] - 1 > found.first[row]]
        for owner, rows in siblings.items()
        if len(rows) > 1
    }
    shared = [owner for owner in rest if rest[owner]]
    wholes = [owner for owner in siblings if not rest.get(owner)]
    segments = [(owner, 0, found.first[owner]) for owner in shared]
    segments += [
        (owner, 0, found.first[owner] if owner in rest else found.end[owner] - 1)
        for owner in wholes
    ]
    segments += [
        (row, found.first[row], found.end[row] - 1 - found.first[row])
        for owner in shared
        for row in rest[owner]
    ]
    return _packed(
        batch,
        segments,
        found=found,
        counts=(len(shared), len(wholes), [len(rest[owner]) for owner in shared]),
    )


def _packed(
    batch: Batch,
    segments: list[tuple[int, int, int]],
    *,
    found: TokenSpans,
    counts: tuple[int, int, list[int]],
) -> Packing:
    """The tensors of segments (row, start, length), on the device of the batch."""
    width, device = batch.tokens.shape[1], batch.tokens.device
    rows, starts, lengths = torch.tensor(segments).unbind(1)
    begins = lengths.cumsum(0) - lengths
    steps = torch.arange(int(lengths.sum()))
    positions = steps + (starts - begins).repeat_interleave(lengths)
    source = positions + (rows * width).repeat_interleave(lengths)
    num_shared, num_wholes, numbers = counts
    heads = num_shared + num_wholes
    # The packed index that token 0 of a row has, or would have: for its prompt, and for the rest.
    prompt_at = torch.zeros(len(found.first), dtype=torch.long)
    prompt_at[rows[:heads]] = begins[:heads]
    prompt_at = prompt_at[torch.tensor(found.owner)]
    rest_at = prompt_at.clone()
    rest_at[rows[heads:]] = (begins - starts)[heads:]
    row, index = batch.mask.cpu().nonzero().unbind(1)
    in_prompt = index - 1 < torch.tensor(found.first)[row]
    before = torch.where(in_prompt, prompt_at[row], rest_at[row]) + index - 1
    sizes = lengths.tolist()
    return Packing(
        source=source.to(device),
        positions=positions.to(device),
        before=before.to(device),
        prompts=sizes[:num_shared],
        wholes=sizes[num_shared:heads],
        completions=[part.tolist() for part in lengths[heads:].split(numbers)] if numbers else [],
    )
