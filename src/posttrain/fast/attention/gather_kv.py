"""Keys and values laid out anew, each as often as it is seen, and their gradients taken back.

Each is one kernel on a GPU that has Triton. There a gradient is summed from a list of places, in
one order and in float32: the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.fast import kernels
from posttrain.models.sampling import at_least_float32
from posttrain.types.devices import send

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where in a row of N tokens each of L keys comes from, and where each token's keys have gone.

    ``at`` [L] is the token of each key; N is that of a key which nobody sees. The keys of token n
    are at ``order[begins[n] : begins[n + 1]]``; shapes [L], [N + 1].
    """

    at: Tensor
    order: Tensor
    begins: Tensor

    @classmethod
    def of(cls, at: Tensor, *, tokens: int) -> Layout:
        """The layout of keys that come from these places in a row of so many tokens.

        >>> Layout.of(torch.tensor([0, 1, 0, 2, 3]), tokens=3).begins
        tensor([0, 2, 3, 4], dtype=torch.int32)
        """
        counts = at.bincount(minlength=tokens)[:tokens]
        return cls(
            at=at.int(),
            order=at.argsort(stable=True).int(),
            begins=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        )

    def to(self, device: torch.device) -> Layout:
        """The same on a device."""
        return Layout(**{name: send(part, device) for name, part in vars(self).items()})

    def copy_(self, other: Layout) -> None:
        """Become another of the same sizes, at the same addresses."""
        for name, part in vars(self).items():
            part.copy_(send(getattr(other, name), part.device))

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.begins) - 1


def lay_out(states: Pair, layout: Layout, *, repeats: int = 1) -> Pair:
    """Keys and values where they are seen, each head so often: [N, K, D] → [L, K · repeats, D].

    Not for autograd: :func:`take_back` is its gradient.
    """
    if kernels.takes(states[0]):
        from posttrain.fast.kernels import fused_gather as fused

        return fused.lay_out(states, layout.at, repeats=repeats)
    places = layout.at.clamp_max(layout.tokens - 1)  # any place does for a key that nobody sees
    keys, values = (part.index_select(0, places).repeat_interleave(repeats, 1) for part in states)
    return keys, values


def take_back(slopes: Pair, layout: Layout, *, repeats: int = 1) -> Pair:
    """The gradients of what was laid out, from those of its copies: → [N, K, D]."""
    if kernels.takes(slopes[0]):
        from posttrain.fast.kernels import fused_gather as fused

        return fused.take_back(slopes, layout.order, begins=layout.begins, repeats=repeats)
    of_key, of_value = (_sums(part, layout, repeats=repeats) for part in slopes)
    return of_key, of_value


def _sums(slopes: Tensor, layout: Layout, *, repeats: int) -> Tensor:
    wide = at_least_float32(slopes).unflatten(1, (-1, repeats)).sum(2)
    sums = wide.new_zeros(layout.tokens + 1, *wide.shape[1:])
    return sums.index_add_(0, layout.at, wide)[:-1].to(slopes.dtype)
