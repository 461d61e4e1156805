"""Attention over packed sequences in one call, for a kernel that takes sequences of any lengths.

A token of a completion sees its prompt and its own completion. So keys and values are gathered
sequence by sequence, those of a prompt once for each of its completions, and their gradients are
summed over the copies. One kernel over many sequences fills a GPU; one kernel from all completions
to a few prompts would not. The copies (for the gradient, one for each head of queries) cost little,
unless long prompts have many short completions (:attr:`KeySequences.gather_pays_off` is False):
then prompts are not copied (:mod:`posttrain.fast.attention.shared_prompt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.attention.blockwise import Block, Flash, Kernel
from posttrain.fast.attention.gather_kv import KeyLayout, gather_kv, scatter_grads
from posttrain.fast.attention.interface import Attention
from posttrain.fast.attention.shared_prompt import Make, SharedPrompt
from posttrain.fast.packing import Packing

MOST_KEYS = 8  # gathered keys for each token; more are not worth the copy


@dataclass(frozen=True, kw_only=True)
class KeySequences:
    """Lengths of S sequences of queries, concatenated in a row, and the keys that each sees.

    ``keys`` are the lengths of what they see, ``keys_at`` [L] the indices of those keys in the row.
    """

    queries: list[int]
    keys: list[int]
    keys_at: Tensor

    @property
    def tokens(self) -> int:
        """All queries."""
        return sum(self.queries)

    @property
    def gather_pays_off(self) -> bool:
        """Whether the keys are few enough to be gathered."""
        return len(self.keys_at) <= MOST_KEYS * self.tokens


def sequences_of(packing: Packing) -> KeySequences:
    """Prompts and whole sequences see themselves, completions their prompt and themselves."""
    heads = [*packing.prompts, *packing.wholes]
    rest = [length for lengths in packing.completions for length in lengths]
    begins = torch.tensor([0, *heads, *rest]).cumsum(0).tolist()
    pieces = list(zip(begins, heads, strict=False))
    numbers = iter(range(len(heads), len(heads) + len(rest)))
    keys = heads.copy()
    for number, (prompt, lengths) in enumerate(
        zip(packing.prompts, packing.completions, strict=True)
    ):
        for length in lengths:
            pieces += [(begins[number], prompt), (begins[next(numbers)], length)]
            keys.append(prompt + length)
    return KeySequences(queries=[*heads, *rest], keys=keys, keys_at=_ranges(pieces))


def _ranges(pieces: list[tuple[int, int]]) -> Tensor:
    """All numbers of ranges (begin, length), one range behind the other.

    >>> _ranges([(7, 2), (0, 3)])
    tensor([7, 8, 0, 1, 2])
    """
    begins, lengths = torch.tensor(pieces).unbind(1)
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + (begins - ends + lengths).repeat_interleave(lengths)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A kernel, and the layout of its keys.

    ``longest`` is how many keys a token sees at most, where that is known.
    """

    kernel: Kernel
    layout: KeyLayout
    longest: int = 0

    @classmethod
    def of(
        cls, found: KeySequences, *, like: Tensor, make: Callable[..., Kernel] = Flash
    ) -> Gathered:
        """All that such a row needs, on the device of ``like``."""
        block = Block(queries=found.queries, keys=found.keys, causal=True)
        layout = KeyLayout.of(found.keys_at, tokens=found.tokens).to(like.device)
        return cls(kernel=make(block, like=like), layout=layout, longest=max(found.keys))


class GatheredPrompts:
    """The attention of one packed row, for :func:`posttrain.fast.attention.interface.attending`."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Mix values over one packed row: [1, H, N, D], [1, K, N, D] twice → [1, N, H, D]."""
        if window is not None and window < self._gathered.longest:
            raise NotImplementedError("packed sequences longer than a layer's window")
        kind = query.device.type
        rows = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
        if torch.is_autocast_enabled(kind):  # autocast does so for torch's own attention
            rows = [row.to(torch.get_autocast_dtype(kind)) for row in rows]
        mixed: Tensor = _Attention.apply(*rows, self._gathered, scale)
        return mixed[None]


class _Attention(torch.autograd.Function):
    """Query [N, H, D], key and value [N, K, D] → mixed values [N, H, D]."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, gathered, scale = given
        keys, values = gather_kv((key, value), gathered.layout)
        mixed, sums = gathered.kernel.forward(query, keys, value=values, scale=scale)
        ctx.save_for_backward(query, key, value, mixed, sums)  # keys are gathered again in backward
        ctx.gathered, ctx.scale = gathered, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        layout, repeats = ctx.gathered.layout, query.shape[1] // key.shape[1]
        # One key for each head of queries: where heads share a key, the kernel would round the sum
        # of their gradients to half precision; scatter_grads sums them in float32.
        of_query, of_keys, of_values = ctx.gathered.kernel.backward(
            gradients[0],
            (query, *gather_kv((key, value), layout, repeats=repeats)),
            mixed=mixed,
            logsumexp=sums,
            scale=ctx.scale,
        )
        own = scatter_grads((of_keys, of_values), layout, repeats=repeats)
        return of_query, *own, None, None


def packed_attention(packing: Packing, *, like: Tensor, make: Make = Flash) -> Attention:
    """The attention of a packed row, computed by the kernel ``make``."""
    if make is Flash:
        found = sequences_of(packing)
        if found.gather_pays_off:
            return GatheredPrompts(Gathered.of(found, like=like))
    return SharedPrompt(packing, make=make)
