"""Packed rows of a few fixed sizes, so that a forward and backward pass can be recorded.

A packing is as long as its sequences are; a recording wants the same sizes every time. So the row
is ``[prompts, whole sequences, padding | completions, padding]`` with both parts of a fixed length.
The padding of each part is a few sequences of their own: they see real keys, so that all they
compute is finite, nobody sees them, and their gradient is zero. A frame may be larger than a
packing needs (:func:`holds`), so a few frames serve batches of all lengths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.models.packing import Packing

TOKENS = 1024  # the parts are multiples of this long, or powers of two where they are shorter
SEQUENCES = 32  # the least number of sequences there is room for
MOST = 16  # frames; what fits none of them is computed without one
LARGER = 1.2  # than needed: what a frame may be, and nobody minds
SELDOM = 3  # times that one is taken that is larger still
PADDING = 128  # the least that "longest" may be, and so the length of a sequence of padding


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

    @property
    def tokens(self) -> int:
        """Tokens of both parts."""
        return self.heads + self.rest


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


def frame_of(packing: Packing) -> Frame:
    """A frame that holds a packing, and is hardly larger; like packings have the same one."""
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


def holds(frame: Frame, packing: Packing) -> bool:
    """Whether a packing, and the padding that it needs then, fit into a frame."""
    heads = [*packing.prompts, *packing.wholes]
    rest = [length for lengths in packing.completions for length in lengths]
    if bool(rest) != bool(frame.rest) or not _takes(
        heads, tokens=frame.heads, number=frame.num_heads, longest=frame.longest_head
    ):
        return False
    groups = [sum(lengths) for lengths in packing.completions]
    padding = _pieces(frame.rest - sum(rest), frame.longest_group)
    return not rest or (
        _takes(rest, tokens=frame.rest, number=frame.num_rest, longest=frame.longest_rest)
        and _takes(groups, tokens=frame.rest, number=frame.num_groups, longest=frame.longest_group)
        and len(padding) <= frame.heads - sum(packing.prompts)  # each must see some key
    )


class Frames:
    """The frames in use. Each costs a recording, so a packing may get one that is too large."""

    def __init__(self) -> None:
        self.known: list[Frame] = []
        self._wished: Counter[Frame] = Counter()

    def choose(self, packing: Packing) -> Frame | None:
        """The frame for a packing; None: none of those in use holds it, and there are too many."""
        own = frame_of(packing)
        fitting = [frame for frame in self.known if holds(frame, packing)]
        best = min(fitting, key=lambda frame: frame.tokens, default=None)
        wasteful = best is not None and best.tokens > LARGER * own.tokens
        self._wished[own] += wasteful
        if best is not None and not (wasteful and self._wished[own] > SELDOM):
            return best
        if len(self.known) < MOST:
            self.known.append(own)
            return own
        return best


def _takes(lengths: list[int], *, tokens: int, number: int, longest: int) -> bool:
    spare = tokens - sum(lengths)
    return spare > 0 and max(lengths) <= longest and len(lengths) + -(-spare // longest) <= number


def fit(packing: Packing, frame: Frame) -> Framed:
    """Put a packing into a frame that holds it."""
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
    padding = _pieces(spare[1], frame.longest_group)
    seen = [1] * (len(padding) - 1)  # by all of the padding but the last; that sees what is left
    prompts = [*packing.prompts, *seen, frame.heads - asked - sum(seen)]
    return Framed(
        frame=frame,
        source=source,
        positions=positions,
        before=places[packing.before],
        heads=_filled([*heads, *_pieces(spare[0], frame.longest_head)], frame.num_heads),
        rest=_filled([*rest, *_pieces(spare[1], frame.longest_rest)], frame.num_rest),
        groups=_filled([*groups, *padding], frame.num_groups),
        prompts=_filled(prompts, frame.num_groups) if rest else [],
    )


def _pieces(count: int, longest: int) -> list[int]:
    """Padding in as few sequences as the frame allows.

    >>> _pieces(300, 128)
    [128, 128, 44]
    """
    return [min(longest, count - begin) for begin in range(0, count, max(longest, 1))]


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
