"""Packed rows of a few fixed sizes, so that a forward and backward pass can be recorded.

A packing is as long as its sequences are; a recording wants the same sizes every time. So padding
follows the packing, as a few sequences of their own: they see themselves, so that all they compute
is finite, nobody else sees them, and their gradient is zero. A frame may be larger than a packing
needs (:func:`holds`), so a few frames serve batches of all lengths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.fast.attention.gather_kv import Layout
from posttrain.fast.attention.gathered import Sequences
from posttrain.fast.packing import Packing

LEAST = 128  # tokens, keys, and room for the longest sequence
SEQUENCES = 32  # the least number of sequences there is room for
MOST = 16  # frames; what fits none of them is computed without one
PRICE = 30  # passes: what a recording costs, about a second


class Frame(NamedTuple):
    """Sizes: tokens of the row, keys laid out, room for sequences, and the longest of them."""

    tokens: int
    keys: int
    sequences: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Framed:
    """A packing in its frame.

    ``source`` and ``positions`` [tokens] as in :class:`Packing`, 0 in the padding. ``queries`` and
    ``keys`` as in :class:`Sequences`, and the ``layout`` of all keys there is room for.
    """

    frame: Frame
    source: Tensor
    positions: Tensor
    queries: list[int]
    keys: list[int]
    layout: Layout


def frame_of(found: Sequences) -> Frame:
    """A frame that holds a packing, and is hardly larger; like packings have the same one."""
    tokens = _tokens(found.tokens)
    spare = tokens - found.tokens
    longest = _power(max(found.keys), least=LEAST)
    return Frame(
        tokens=tokens,
        keys=_power(len(found.keys_at) + spare, least=LEAST),  # padding sees itself
        sequences=_power(len(found.queries) + len(_pieces(spare, longest)), least=SEQUENCES),
        longest=longest,
    )


def holds(frame: Frame, found: Sequences) -> bool:
    """Whether sequences, and the padding that they need then, fit into a frame."""
    spare = frame.tokens - found.tokens
    return (
        spare >= 0
        and len(found.keys_at) + spare <= frame.keys
        and max(found.keys) <= frame.longest
        and len(found.queries) + len(_pieces(spare, frame.longest)) <= frame.sequences
    )


class Frames:
    """The frames in use. Each costs a recording, so a packing may get one that is too large.

    It gets its own once all that was wasted on its like would have paid for one.
    """

    def __init__(self) -> None:
        self.known: list[Frame] = []
        self._wasted: Counter[Frame] = Counter()

    def choose(self, found: Sequences, *, new: bool = True) -> Frame | None:
        """The frame for a packing: one that is known, or a ``new`` one, to be added when it is.

        None: none of those known holds it, and it gets no new one; or there are too many already.
        """
        own = frame_of(found)
        fitting = [frame for frame in self.known if holds(frame, found)]
        best = min(fitting, key=_work, default=None)
        wasted = 0 if best is None else max(0, _work(best) - _work(own))
        self._wasted[own] += wasted
        if best is not None and (not wasted or self._wasted[own] <= PRICE * _work(own)):
            return best
        return own if new and len(self.known) < MOST else best


def _work(frame: Frame) -> int:
    """What a pass takes, in tokens: to lay out a key is little beside what a token costs."""
    return frame.tokens + frame.keys // 64


def fit(packing: Packing, frame: Frame, *, found: Sequences) -> Framed:
    """Put a packing, of these sequences, into a frame that holds it."""
    used = found.tokens
    source, positions = torch.zeros(2, frame.tokens, dtype=torch.long)
    source[:used], positions[:used] = packing.source, packing.positions
    padding = _pieces(frame.tokens - used, frame.longest)
    seen = torch.cat([found.keys_at, torch.arange(used, frame.tokens)])
    keys_at = torch.full((frame.keys,), frame.tokens)
    keys_at[: len(seen)] = seen
    return Framed(
        frame=frame,
        source=source,
        positions=positions,
        queries=_filled([*found.queries, *padding], frame.sequences),
        keys=_filled([*found.keys, *padding], frame.sequences),
        layout=Layout.of(keys_at, tokens=frame.tokens),
    )


def _pieces(count: int, longest: int) -> list[int]:
    """Padding in as few sequences as the frame allows.

    >>> _pieces(300, 128)
    [128, 128, 44]
    """
    return [min(longest, count - begin) for begin in range(0, count, longest)]


def _filled(lengths: list[int], count: int) -> list[int]:
    return lengths + [0] * (count - len(lengths))


def _tokens(count: int) -> int:
    """Room for so many tokens: between two powers of two there are four sizes.

    So all micro-batches that fill a usual budget have the same.

    >>> [_tokens(count) for count in (3, 130, 1025, 5000)]
    [128, 160, 1280, 5120]
    """
    step = _power(count, least=LEAST) // 8
    return max(LEAST, -(-count // step) * step)


def _power(count: int, *, least: int) -> int:
    """The least power of two from ``least`` on that is no less."""
    size = least
    while size < count:
        size *= 2
    return size
