"""Attention of many pairs of sequences, queries of one to keys of the other: a block.

A kernel gives the mixed values and the log-sum-exp of the scores, and the gradients for any output
and log-sum-exp: those of the block alone, or of a softmax of which it is a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
_flash: Any = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lengths of S sequences of queries, and of the S sequences of keys that they see.

    ``causal``: the last keys are the queries' own, and each sees itself and those before it.
    """

    queries: list[int]
    keys: list[int]
    causal: bool


class Kernel(Protocol):
    """Attention of one block; sequences are concatenated, without padding."""

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[N, H, D], [L, K, D], [L, K, D] → mixed values [N, H, D], log-sum-exp [H, N]."""
        ...

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        mixed: Tensor,
        logsumexp: Tensor,
        scale: float,
    ) -> Gradients:
        """The gradients of query, key and value.

        ``P = exp(scale · q·k − logsumexp)``, ``dv = Pᵀ·dO``, ``dS = P ∘ (dO·vᵀ − rowsum(dO ∘ O))``,
        ``dq = scale · dS·k``, ``dk = scale · dSᵀ·q``.
        """
        ...


class Plain:
    """The equations themselves, sequence by sequence: for tests, and for any device.

    There may be fewer heads of keys than of queries.
    """

    def __init__(self, block: Block, *, like: Tensor) -> None:
        self._block = block

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        mixed, sums = [], []
        for part, keys, values in self._parts(query, key, value=value):
            scores = self._scores(part, keys, scale=scale)
            sums.append(scores.logsumexp(-1))
            weights = (scores - sums[-1][..., None]).exp()
            mixed.append(torch.einsum("hnl,lhd->nhd", weights, values.to(weights.dtype)))
        return torch.cat(mixed).to(query.dtype), torch.cat(sums, dim=1)

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        mixed: Tensor,
        logsumexp: Tensor,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        query, key, value = inputs
        lengths, results = self._block.queries, []
        ours = zip(
            gradient.split(lengths), mixed.split(lengths), logsumexp.split(lengths, 1), strict=True
        )
        for (of_mixed, out, sums), (part, keys, values) in zip(
            ours, self._parts(query, key, value=value), strict=True
        ):
            weights = (self._scores(part, keys, scale=scale) - sums[..., None]).exp()
            wide = weights.dtype
            given = of_mixed.to(wide)
            inner = (given * out.to(wide)).sum(-1).t()[..., None]
            of_scores = torch.einsum("nhd,lhd->hnl", given, values.to(wide)) - inner
            of_scores = scale * weights * of_scores
            results.append(
                (
                    torch.einsum("hnl,lhd->nhd", of_scores, keys.to(wide)),
                    torch.einsum("hnl,nhd->lhd", of_scores, part.to(wide)),
                    torch.einsum("hnl,nhd->lhd", weights, given),
                )
            )
        first, *others = (torch.cat(parts) for parts in zip(*results, strict=True))
        second, third = (part.unflatten(1, (key.shape[1], -1)).sum(2) for part in others)
        return first.to(query.dtype), second.to(key.dtype), third.to(value.dtype)

    def _parts(self, query: Tensor, key: Tensor, *, value: Tensor) -> Any:
        lengths, repeats = self._block.keys, query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        return zip(
            query.split(self._block.queries), key.split(lengths), value.split(lengths), strict=True
        )

    def _scores(self, query: Tensor, key: Tensor, *, scale: float) -> Tensor:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = scale * torch.einsum("nhd,lhd->hnl", query.to(wide), key.to(wide))
        if not self._block.causal:
            return scores
        queries, keys = scores.shape[1:]
        every = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        ahead = every.triu(1 + keys - queries)
        return scores.masked_fill(ahead, -torch.inf)


class Padded:
    """The CPU's own kernel, on sequences padded to the longest of the block.

    Where it is causal, there may be no keys before the queries' own.
    """

    def __init__(self, block: Block, *, like: Tensor) -> None:
        if block.causal and block.keys != block.queries:
            raise ValueError("block: this kernel wants keys that are the queries' own")
        self._causal = block.causal
        self._queries = _Rows(block.queries)
        self._keys = self._queries if block.causal else _Rows(block.keys)
        self._mask = None
        if not block.causal and not self._keys.even:  # causal ones never see the padding
            indices = torch.arange(self._keys.width)
            hidden = indices >= torch.tensor(block.keys)[:, None]
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
            self._mask = mask[:, None, None]

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        mixed, logsumexp = _flash._scaled_dot_product_flash_attention_for_cpu(
            self._queries.pad(query).transpose(1, 2),
            self._keys.pad(key).transpose(1, 2),
            self._keys.pad(value).transpose(1, 2),
            0.0,
            self._causal,
            attn_mask=self._mask,
            scale=scale,
        )
        sums = self._queries.cut(logsumexp.transpose(1, 2))
        return self._queries.cut(mixed.transpose(1, 2)), sums.t()

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        mixed: Tensor,
        logsumexp: Tensor,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`. Padding has no gradient: its rows of ``gradient`` are zero."""
        query, key, value = inputs
        found = _flash._scaled_dot_product_flash_attention_for_cpu_backward(
            self._queries.pad(gradient).transpose(1, 2),
            self._queries.pad(query).transpose(1, 2),
            self._keys.pad(key).transpose(1, 2),
            self._keys.pad(value).transpose(1, 2),
            self._queries.pad(mixed).transpose(1, 2),
            self._queries.pad(logsumexp.t()).transpose(1, 2),
            0.0,
            self._causal,
            attn_mask=self._mask,
            scale=scale,
        )
        first, second, third = (part.transpose(1, 2) for part in found)
        return self._queries.cut(first), self._keys.cut(second), self._keys.cut(third)


class _Rows:
    """Concatenated sequences as rows, padded to the longest."""

    def __init__(self, lengths: list[int]) -> None:
        self.width = max(lengths)
        self.even = min(lengths) == self.width
        self._count = len(lengths)
        inside = torch.arange(self.width) < torch.tensor(lengths)[:, None]
        self._indices = inside.flatten().nonzero()[:, 0]

    def pad(self, packed: Tensor) -> Tensor:
        """[N, …] → [S, L, …], zero in the padding."""
        shape = (self._count, self.width, *packed.shape[1:])
        if self.even:
            return packed.reshape(shape)
        empty = packed.new_zeros(self._count * self.width, *packed.shape[1:])
        return empty.index_copy_(0, self._indices, packed).view(shape)

    def cut(self, padded: Tensor) -> Tensor:
        """[S, L, …] → [N, …]."""
        flat = padded.flatten(0, 1)
        return flat if self.even else flat.index_select(0, self._indices)


class Flash:
    """FlashAttention for sequences of any lengths, on a GPU in half precision."""

    def __init__(self, block: Block, *, like: Tensor) -> None:
        self._causal = block.causal
        self._queries = offsets_of(block.queries).to(like.device)
        self._keys = offsets_of(block.keys).to(like.device)
        # At least 2: for single queries the kernel expects another layout.
        self._longest = max(2, *block.queries), max(2, *block.keys)
        self._randomness = _no_randomness(like.device)

    @classmethod
    def at(cls, queries: Tensor, keys: Tensor, *, longest: int) -> Flash:
        """The causal kernel of sequences whose offsets it reads from these tensors at each run."""
        kernel = cls.__new__(cls)
        kernel._causal, kernel._longest = True, (longest, longest)
        kernel._queries, kernel._keys = queries, keys
        kernel._randomness = _no_randomness(queries.device)
        return kernel

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`. K may be less than H."""
        mixed, logsumexp, *_ = _flash._flash_attention_forward(
            query,
            key,
            value,
            self._queries,
            self._keys,
            *self._longest,
            0.0,
            self._causal,
            False,
            scale=scale,
        )
        return mixed, logsumexp

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        mixed: Tensor,
        logsumexp: Tensor,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        found: Gradients = _flash._flash_attention_backward(
            gradient.contiguous(),
            *inputs,
            mixed.contiguous(),
            logsumexp.contiguous(),
            self._queries,
            self._keys,
            *self._longest,
            0.0,
            self._causal,
            *self._randomness,
            scale=scale,
        )
        return found


def _no_randomness(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeds of dropout, which the kernel reads although there is none."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def offsets_of(lengths: list[int]) -> Tensor:
    """Where each sequence begins, and the last one ends. Shapes: [S + 1], int32.

    >>> offsets_of([2, 3])
    tensor([0, 2, 5], dtype=torch.int32)
    """
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
