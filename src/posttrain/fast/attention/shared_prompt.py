"""Attention over packed sequences in which a prompt stands once for all its completions.

A token of a completion sees its prompt and its own completion. These are two blocks of one
softmax: each gives its mixed values O and its log-sum-exp ℓ, and together ``ℓ = log(exp ℓ₁ +
exp ℓ₂)``, ``O = exp(ℓ₁ − ℓ)·O₁ + exp(ℓ₂ − ℓ)·O₂``. The gradient of each block follows from the
whole O and ℓ alone, as in ring attention (Liu et al. 2023, arXiv:2310.01889), so it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.attention.blockwise import Block, Kernel, Plain
from posttrain.fast.packing import Packing

Make = Callable[..., Kernel]


class SharedPrompt:
    """The attention of one packed row, for :func:`posttrain.fast.attention.interface.attending`."""

    def __init__(self, packing: Packing, *, make: Make = Plain) -> None:
        self._packing = packing
        self._make = make
        self._blocks: Blocks | None = None

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
        if window is not None and window < self._packing.longest:
            raise NotImplementedError("packed sequences longer than a layer's window")
        if self._blocks is None:
            self._blocks = _blocks_of(self._packing, make=self._make, like=query)
        return SharedAttention.mix((query, key, value), self._blocks, scale=scale)


@dataclass(frozen=True)
class Blocks:
    """The kernels of a packed row: within its head, within the rest, from the rest to prompts.

    The row is ``[head | rest]``: the rest begins at ``completions_begin``, the prompts that it sees
    end at ``prompts_end``.
    """

    heads: Kernel
    rest: Kernel | None = None
    given: Kernel | None = None
    completions_begin: int = 0
    prompts_end: int = 0


def _blocks_of(packing: Packing, *, make: Make, like: Tensor) -> Blocks:
    heads = [*packing.prompts, *packing.wholes]
    rest = [length for lengths in packing.completions for length in lengths]
    own = given = None
    if rest:
        own = make(Block(queries=rest, keys=rest, causal=True), like=like)
        # All completions of a prompt see all of it: to the kernel they are one sequence.
        together = [sum(lengths) for lengths in packing.completions]
        given = make(Block(queries=together, keys=packing.prompts, causal=False), like=like)
    return Blocks(
        make(Block(queries=heads, keys=heads, causal=True), like=like),
        own,
        given,
        completions_begin=sum(heads),
        prompts_end=sum(packing.prompts),
    )


class SharedAttention(torch.autograd.Function):
    """Query [N, H, D], key and value [N, K, D] → mixed values [N, H, D]."""

    @classmethod
    def mix(cls, states: tuple[Tensor, Tensor, Tensor], blocks: Blocks, *, scale: float) -> Tensor:
        """The same for one row as a model has it: [1, H, N, D], [1, K, N, D] × 2 → [1, N, H, D]."""
        kind = states[0].device.type
        if torch.is_autocast_enabled(kind):  # autocast does so for torch's own attention
            query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in states)
        else:
            query, key, value = states
        rows = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
        repeats = query.shape[1] // key.shape[1]
        rows[1:] = (part.repeat_interleave(repeats, dim=1) for part in rows[1:])
        mixed: Tensor = cls.apply(*rows, blocks, scale)
        return mixed[None]

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, blocks, scale = given
        begin, end = blocks.completions_begin, blocks.prompts_end
        mixed, sums = blocks.heads.forward(
            query[:begin], key[:begin], value=value[:begin], scale=scale
        )
        merged = None
        if blocks.rest is not None:
            own = blocks.rest.forward(query[begin:], key[begin:], value=value[begin:], scale=scale)
            theirs = blocks.given.forward(query[begin:], key[:end], value=value[:end], scale=scale)
            rest, merged = _merge(own, theirs)
            mixed = torch.cat([mixed, rest])
        ctx.save_for_backward(query, key, value, mixed, sums, merged)
        ctx.blocks, ctx.scale = blocks, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums, merged = ctx.saved_tensors
        blocks, gradient = ctx.blocks, gradients[0]
        begin, end = blocks.completions_begin, blocks.prompts_end
        heads = blocks.heads.backward(
            gradient[:begin],
            (query[:begin], key[:begin], value[:begin]),
            mixed=mixed[:begin],
            logsumexp=sums,
            scale=ctx.scale,
        )
        if blocks.rest is None:
            return (*heads, None, None)
        whole = {"mixed": mixed[begin:], "logsumexp": merged, "scale": ctx.scale}
        own = blocks.rest.backward(
            gradient[begin:], (query[begin:], key[begin:], value[begin:]), **whole
        )
        theirs = blocks.given.backward(
            gradient[begin:], (query[begin:], key[:end], value[:end]), **whole
        )
        own[0].add_(theirs[0])
        for part, more in zip(heads[1:], theirs[1:], strict=True):
            part[:end].add_(more)
        found = (torch.cat(parts) for parts in zip(heads, own, strict=True))
        return (*found, None, None)


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two blocks of one softmax as one: mixed values [N, H, D] and log-sum-exp [H, N] of both."""
    together = torch.logaddexp(first[1], second[1])
    shares = ((sums - together).exp().t()[..., None] for sums in (first[1], second[1]))
    mixed = sum(
        share * part.to(share.dtype)
        for share, part in zip(shares, (first[0], second[0]), strict=True)
    )
    assert isinstance(mixed, Tensor)
    return mixed.to(first[0].dtype), together
