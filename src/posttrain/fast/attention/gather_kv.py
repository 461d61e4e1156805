"""Gathering keys and values, one copy for each sequence that sees them; scattering gradients back.

Both are one kernel on a GPU that has Triton. There the gradient of a token is the sum over the list
of its copies, always in the same order and in float32, so that it is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.fast import kernels
from posttrain.models.sampling import at_least_float32
from posttrain.types.batch import send

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class KeyLayout:
    """Which of N tokens each of L gathered keys comes from, and where the copies of a token are.

    ``at`` [L] is the token of each key; N stands for a key that nobody sees. The keys of token n
    are at ``order[begins[n] : begins[n + 1]]``; shapes [L], [N + 1].
    """

    at: Tensor
    order: Tensor
    begins: Tensor

    @classmethod
    def of(cls, at: Tensor, *, tokens: int) -> KeyLayout:
        """The layout of keys that come from these tokens of a row.

        >>> KeyLayout.of(torch.tensor([0, 1, 0, 2, 3]), tokens=3).begins
        tensor([0, 2, 3, 4], dtype=torch.int32)
        """
        counts = at.bincount(minlength=tokens)[:tokens]
        return cls(
            at=at.int(),
            order=at.argsort(stable=True).int(),
            begins=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        )

    def to(self, device: torch.device) -> KeyLayout:
        """The same on a device."""
        return KeyLayout(**{name: send(part, device) for name, part in vars(self).items()})

    def copy_(self, other: KeyLayout) -> None:
        """Take the values of another layout of the same sizes, at the same addresses."""
        for name, part in vars(self).items():
            part.copy_(send(getattr(other, name), part.device))

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.begins) - 1


def gather_kv(states: Pair, layout: KeyLayout, *, repeats: int = 1) -> Pair:
    """Copy keys and values, each head ``repeats`` times: [N, K, D] → [L, K · repeats, D].

    Not for autograd: :func:`scatter_grads` is its gradient.
    """
    if kernels.takes(states[0]):
        from posttrain.fast.kernels import fused_gather as fused

        return fused.gather_kv(states, layout.at, repeats=repeats)
    indices = layout.at.clamp_max(layout.tokens - 1)  # any token does for a key that nobody sees
    keys, values = (part.index_select(0, indices).repeat_interleave(repeats, 1) for part in states)
    return keys, values


def scatter_grads(gradients: Pair, layout: KeyLayout, *, repeats: int = 1) -> Pair:
    """The gradients of keys and values, summed over their copies: → [N, K, D]."""
    if kernels.takes(gradients[0]):
        from posttrain.fast.kernels import fused_gather as fused

        return fused.scatter_grads(gradients, layout.order, begins=layout.begins, repeats=repeats)
    of_key, of_value = (_sums(part, layout, repeats=repeats) for part in gradients)
    return of_key, of_value


def _sums(gradients: Tensor, layout: KeyLayout, *, repeats: int) -> Tensor:
    wide = at_least_float32(gradients).unflatten(1, (-1, repeats)).sum(2)
    sums = wide.new_zeros(layout.tokens + 1, *wide.shape[1:])
    return sums.index_add_(0, layout.at, wide)[:-1].to(gradients.dtype)
