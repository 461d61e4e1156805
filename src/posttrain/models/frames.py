"""Packed rows of a few fixed sizes, so that a forward and backward pass can be recorded.

A packing is as long as its sequences are; a recording wants the same sizes every time. So the row
is ``[prompts, whole sequences, padding | completions, padding]`` with both parts of a fixed length.
The padding of each part is a few sequences of their own: they see real keys, so that all they
compute is finite, nobody sees them, and their gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.models.block_attention import Block
from posttrain.models.packing import Packing

TOKENS = 1024  # the parts are multiples of this long, or powers of two where they are shorter
SEQUENCES = 32  # the least number of sequences there is room for
PADDING = 128  # tokens of a sequence of padding, and the least that "longest" may be


class Frame(NamedTuple):
    """Sizes: tokens of both parts, room for sequences in each, and the longest of each kind."""

    heads: int
    rest: int
    num_heads: int
    num_rest: int
    num_groups: int
    longest_head: int
    longest_rest: int
    longest_group: int
    longest_prompt: int


@dataclass(frozen=True, kw_only=True)
class Framed:
    """A packing in its frame.

    ``source`` and ``positions`` [heads + rest] as in :class:`Packing`, 0 in the padding; ``before``
    [M] the places of the states wanted. The blocks of attention are lengths of sequences: ``heads``
    and ``rest`` see themselves, the queries of ``groups`` the keys ``prompts``.
    """

    frame: Frame
    source: Tensor
    positions: Tensor
    before: Tensor
    heads: list[int]
    rest: list[int]
    groups: list[int]
    prompts: list[int]

    def blocks(self) -> list[Block]:
        """The blocks of attention: within the first part, within the second, between them."""
        found = [Block(queries=self.heads, keys=self.heads, causal=True)]
        if self.frame.rest:
            found.append(Block(queries=self.rest, keys=self.rest, causal=True))
            found.append(Block(queries=self.groups, keys=self.prompts, causal=False))
        return found


def frame_of(packing: Packing) -> Frame:
    """The smallest frame that holds a packing; like packings have the same one."""
    heads = [*packing.prompts, *packing.wholes]
    groups = [sum(lengths) for lengths in packing.completions]
    rest = [length for lengths in packing.completions for length in lengths]
    tokens = _tokens(sum(heads) + 1), _tokens(sum(rest) + 1) if rest else 0
    pieces = TOKENS // PADDING  # of padding, at most
    return Frame(
        heads=tokens[0],
        rest=tokens[1],
        num_heads=_power(len(heads) + pieces, least=SEQUENCES),
        num_rest=_power(len(rest) + pieces, least=SEQUENCES) if rest else 0,
        num_groups=_power(len(groups) + 1, least=SEQUENCES) if rest else 0,
        longest_head=_power(max(heads), least=PADDING),
        longest_rest=_power(max(rest), least=PADDING) if rest else 0,
        longest_group=_power(max(groups), least=TOKENS) if rest else 0,
        longest_prompt=_power(tokens[0], least=PADDING) if rest else 0,
    )


def fit(packing: Packing, frame: Frame) -> Framed:
    """Put a packing into its frame."""
    heads = [*packing.prompts, *packing.wholes]
    rest = [length for lengths in packing.completions for length in lengths]
    begin, asked = sum(heads), sum(packing.prompts)
    spare = frame.heads - begin, frame.rest - sum(rest)
    places = torch.arange(len(packing.source))
    places = torch.where(places < begin, places, places + spare[0])
    source = torch.zeros(frame.heads + frame.rest, dtype=torch.long)
    positions = torch.zeros_like(source)
    source[places], positions[places] = packing.source, packing.positions
    groups = [sum(lengths) for lengths in packing.completions]
    return Framed(
        frame=frame,
        source=source,
        positions=positions,
        before=places[packing.before],
        heads=_filled([*heads, *_pieces(spare[0])], frame.num_heads),
        rest=_filled([*rest, *_pieces(spare[1])], frame.num_rest) if rest else [],
        groups=_filled([*groups, spare[1]], frame.num_groups) if rest else [],
        prompts=_filled([*packing.prompts, frame.heads - asked], frame.num_groups) if rest else [],
    )


def _pieces(count: int) -> list[int]:
    """Padding in sequences of a length that asks for no larger frame.

    >>> _pieces(300)
    [128, 128, 44]
    """
    return [min(PADDING, count - begin) for begin in range(0, count, PADDING)]


def _filled(lengths: list[int], count: int) -> list[int]:
    return lengths + [0] * (count - len(lengths))


def _tokens(count: int) -> int:
    """Room for so many tokens.

    >>> [_tokens(count) for count in (3, 100, 1025, 5000)]
    [128, 128, 2048, 5120]
    """
    return -(-count // TOKENS) * TOKENS if count > TOKENS else _power(count, least=128)


def _power(count: int, *, least: int) -> int:
    """The least power of two from ``least`` on that is no less."""
    size = least
    while size < count:
        size *= 2
    return size
