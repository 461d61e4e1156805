"""Packed rows of a few fixed sizes, so that a forward and backward pass can be captured.

A packing is as long as its sequences are; a CUDA graph wants the same sizes every time. So padding
follows the packing, as a few sequences of their own: each sees itself, so that all it computes is
finite; no other sequence sees it, and its gradient is zero. A bucket may be larger than a packing
needs (:func:`holds`), so a few buckets serve batches of all lengths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.fast.attention.gather_kv import KeyLayout
from posttrain.fast.attention.gathered import KeySequences
from posttrain.fast.packing import Packing

LEAST = 128  # the fewest tokens, keys, and tokens of the longest sequence in a bucket
SEQUENCES = 32  # the fewest sequences of a bucket
MOST = 16  # buckets at most; a packing that fits none of them is computed without one
PRICE = 30  # what a capture costs, in passes: about a second


class Bucket(NamedTuple):
    """Capacity: tokens of the row, gathered keys, sequences, and tokens of the longest one."""

    tokens: int
    keys: int
    sequences: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Bucketed:
    """A packing in its bucket.

    ``source`` and ``positions`` [tokens] as in :class:`Packing`, 0 in the padding. ``queries`` and
    ``keys`` as in :class:`KeySequences`, and the ``layout`` of all keys of the bucket.
    """

    bucket: Bucket
    source: Tensor
    positions: Tensor
    queries: list[int]
    keys: list[int]
    layout: KeyLayout


def bucket_of(found: KeySequences) -> Bucket:
    """A bucket that holds a packing and is hardly larger; similar packings share one."""
    tokens = _tokens(found.tokens)
    spare = tokens - found.tokens
    longest = _power(max(found.keys), least=LEAST)
    return Bucket(
        tokens=tokens,
        keys=_power(len(found.keys_at) + spare, least=LEAST),  # padding sees itself
        sequences=_power(len(found.queries) + len(_pieces(spare, longest)), least=SEQUENCES),
        longest=longest,
    )


def holds(bucket: Bucket, found: KeySequences) -> bool:
    """Whether sequences, and the padding that they need then, fit into a bucket."""
    spare = bucket.tokens - found.tokens
    return (
        spare >= 0
        and len(found.keys_at) + spare <= bucket.keys
        and max(found.keys) <= bucket.longest
        and len(found.queries) + len(_pieces(spare, bucket.longest)) <= bucket.sequences
    )


class Buckets:
    """The buckets in use. Each costs a capture, so a packing may get one that is too large.

    Packings of a size get a bucket of their own once the work they wasted would have paid for it.
    """

    def __init__(self) -> None:
        self.known: list[Bucket] = []
        self._wasted: Counter[Bucket] = Counter()

    def choose(self, found: KeySequences, *, new: bool = True) -> Bucket | None:
        """The bucket for a packing: a known one, or a ``new`` one for the caller to capture.

        None: no known bucket holds it, and there may be no new one.
        """
        own = bucket_of(found)
        fitting = [bucket for bucket in self.known if holds(bucket, found)]
        best = min(fitting, key=_work, default=None)
        wasted = 0 if best is None else max(0, _work(best) - _work(own))
        self._wasted[own] += wasted
        if best is not None and (not wasted or self._wasted[own] <= PRICE * _work(own)):
            return best
        return own if new and len(self.known) < MOST else best


def _work(bucket: Bucket) -> int:
    """What a pass costs, in tokens: gathering a key costs little beside computing a token."""
    return bucket.tokens + bucket.keys // 64


def fit(packing: Packing, bucket: Bucket, *, found: KeySequences) -> Bucketed:
    """Put a packing, of these sequences, into a bucket that holds it."""
    used = found.tokens
    source, positions = torch.zeros(2, bucket.tokens, dtype=torch.long)
    source[:used], positions[:used] = packing.source, packing.positions
    padding = _pieces(bucket.tokens - used, bucket.longest)
    seen = torch.cat([found.keys_at, torch.arange(used, bucket.tokens)])
    keys_at = torch.full((bucket.keys,), bucket.tokens)
    keys_at[: len(seen)] = seen
    return Bucketed(
        bucket=bucket,
        source=source,
        positions=positions,
        queries=_filled([*found.queries, *padding], bucket.sequences),
        keys=_filled([*found.keys, *padding], bucket.sequences),
        layout=KeyLayout.of(keys_at, tokens=bucket.tokens),
    )


def _pieces(count: int, longest: int) -> list[int]:
    """Padding in as few sequences as the bucket allows.

    >>> _pieces(300, 128)
    [128, 128, 44]
    """
    return [min(longest, count - begin) for begin in range(0, count, longest)]


def _filled(lengths: list[int], count: int) -> list[int]:
    return lengths + [0] * (count - len(lengths))


def _tokens(count: int) -> int:
    """The tokens of a bucket for so many: between two powers of two there are four sizes.

    So all micro-batches that fill a usual budget get the same.

    >>> [_tokens(count) for count in (3, 130, 1025, 5000)]
    [128, 160, 1280, 5120]
    """
    step = _power(count, least=LEAST) // 8
    return max(LEAST, -(-count // step) * step)


def _power(count: int, *, least: int) -> int:
    """The smallest power of two, at least ``least``, that is no less than ``count``."""
    size = least
    while size < count:
        size *= 2
    return size
