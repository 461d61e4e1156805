"""Tensor operations shared by every algorithm: the one shift, masked and group statistics.

Statistics subtract an anchor (a value that is really there) before they average. So equal values
give deviations of exactly zero, not float noise, and a common offset of 1e8 costs no digits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms import checks

Deviation = Literal["sample", "population"]


def shift(predictions: Tensor) -> Tensor:
    """Move predictions to the token they are about: ``out[:, t] = predictions[:, t − 1]``.

    A causal model's output at position t − 1 (logits, hidden state, value) is about token t. This
    is the only shift in posttrain. Token 0 has nothing before it: its row is zero, and it can
    never be a token that the policy chose. Shapes: [B, T, …] → [B, T, …].

    >>> shift(torch.tensor([[5.0, 6.0, 7.0]]))
    tensor([[0., 5., 6.]])
    """
    return torch.cat([torch.zeros_like(predictions[:, :1]), predictions[:, :-1]], dim=1)


def log_softmax(logits: Tensor) -> Tensor:
    """Stable log-probabilities over the last dimension, with ±inf logits given their limit.

    ``log π(v) = z_v − log Σ_u exp z_u``. A logit of −inf is an impossible token; a logit of +inf
    takes all the probability (several share it). Shapes: [..., V] → [..., V].

    >>> log_softmax(torch.tensor([0.0, float("-inf"), 0.0])).exp()
    tensor([0.5000, 0.0000, 0.5000])
    >>> log_softmax(torch.tensor([0.0, float("inf")])).exp()
    tensor([0., 1.])
    """
    certain = torch.isposinf(logits)
    if bool(certain.any()):
        limit = torch.zeros_like(logits).masked_fill(~certain, -torch.inf)
        logits = torch.where(certain.any(-1, keepdim=True), limit, logits)
    if bool(torch.isnan(logits).any() or torch.isneginf(logits).all(-1).any()):
        raise ValueError(
            "logits: a row is NaN or leaves no token possible; look for a diverged model or for "
            "a filter (top-k, bad words) that removed the whole vocabulary"
        )
    return torch.log_softmax(logits, dim=-1)


def gather_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under the logits of its own position.

    Shapes: logits [..., V], tokens [...] → [...].

    >>> gather_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    checks.same_shape("tokens", tokens, like=logits[..., 0])
    return log_softmax(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``log π(token t | tokens before t)`` from a causal model's logits.

    Shapes: logits [B, T, V], tokens [B, T] → [B, T]; column 0 means nothing (see :func:`shift`).

    >>> logits = torch.tensor([[[0.0, 1.0986], [9.0, 9.0]]])  # after token 0: odds of 1 to 3
    >>> token_logprobs(logits, torch.tensor([[0, 1]])).exp()[:, 1]
    tensor([0.7500])
    """
    return gather_logprobs(shift(logits), tokens)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the whole distribution, in nats: ``H = −Σ_v π(v) log π(v)``.

    Shapes: [..., V] → [...].

    >>> entropy(torch.tensor([0.0, 0.0]))  # a fair coin: log 2
    tensor(0.6931)
    """
    logprobs = log_softmax(logits)
    probabilities = logprobs.exp()
    return -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(-1)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask``, exactly zero (value and gradient) elsewhere, even for NaN.

    >>> keep(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return values.masked_fill(~mask, 0.0)


def masked_mean(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean over the masked-in entries, of all or along ``dim``; 0 where none is.

    Shapes: any, same → [], or without ``dim``.

    >>> masked_mean(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    tensor(2.)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 99.0]]), mask, dim=1)
    tensor([2., 5.])
    """
    checks.same_shape("mask", mask, like=values)
    return keep(values, mask).sum(dim=dim) / mask.sum(dim=dim).clamp_min(1)


def masked_centre(values: Tensor, mask: Tensor) -> Tensor:
    """``x − mean(x)`` over the masked-in entries, zero elsewhere. Shapes: any, same → same.

    >>> masked_centre(torch.full((7,), 0.7), torch.ones(7, dtype=torch.bool)).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    checks.same_shape("mask", mask, like=values)
    if not bool(mask.any()):
        return torch.zeros_like(values)
    shifted = keep(values - values[mask].max(), mask)
    return keep(shifted - masked_mean(shifted, mask), mask)


def masked_variance(values: Tensor, mask: Tensor, *, deviation: Deviation = "population") -> Tensor:
    """``Σ (x − mean)² / n`` (population) or ``/ (n − 1)`` (sample); 0 for fewer than two entries.

    >>> masked_variance(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    tensor(1.)
    """
    squares = masked_centre(values, mask).square().sum()
    return squares / _degrees(mask.sum(), deviation)


def whiten(
    values: Tensor, mask: Tensor, *, centre: bool = True, deviation: Deviation = "population"
) -> Tensor:
    """``(x − mean) / std`` over the masked-in entries; equal entries give exactly 0.

    With ``centre=False`` the scale alone is changed: ``x / std``. Shapes: any, same → same.

    >>> whiten(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    tensor([-1.,  1.,  0.])
    """
    spread = masked_variance(values, mask, deviation=deviation).sqrt()
    signal = spread > noise_floor(values.dtype) * keep(values, mask).abs().max()
    scale = torch.where(signal, spread, 1.0)
    if centre:
        return keep(masked_centre(values, mask), signal) / scale
    return keep(values, mask) / scale


def noise_floor(dtype: torch.dtype) -> float:
    """Relative spread below which values of ``dtype`` are equal but for rounding.

    >>> noise_floor(torch.float64) < 1e-14
    True
    """
    return 16 * torch.finfo(dtype).eps


def group_index(groups: Tensor) -> tuple[Tensor, int]:
    """Group numbers as 0 … n − 1, and n. Groups may be of any size and in any order.

    >>> group_index(torch.tensor([7, 3, 7]))
    (tensor([1, 0, 1]), 2)
    """
    numbers, index = groups.unique(return_inverse=True)
    return index, len(numbers)


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Sum over a sequence's group, for each sequence. Shapes: [B], [B] → [B].

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([5., 2., 5.])
    """
    checks.same_shape("groups", groups, like=values)
    index, size = group_index(groups)
    return values.new_zeros(size).index_add(0, index, values)[index]


def group_max(values: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Largest valid value of a sequence's group, for each sequence; 0 where none is valid.

    >>> group_max(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([4., 2., 4.])
    """
    checks.same_shape("groups", groups, like=values)
    index, size = group_index(groups)
    candidates = values if valid is None else values.masked_fill(~valid, -torch.inf)
    largest = values.new_full((size,), -torch.inf).scatter_reduce(0, index, candidates, "amax")
    return largest.masked_fill(torch.isneginf(largest), 0.0)[index]


def group_count(groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """How many valid members a sequence's group has, for each sequence. Shapes: [B] → [B].

    >>> group_count(torch.tensor([0, 1, 0]))
    tensor([2, 1, 2])
    """
    members = torch.ones_like(groups) if valid is None else valid.to(groups.dtype)
    return group_sum(members, groups)


def group_centre(values: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """``x_i − mean of its group``; exactly 0 in a group of equal values, 0 where not valid.

    Shapes: [B], [B] → [B].

    >>> group_centre(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([-1.,  1.,  0.])
    """
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    shifted = keep(values - group_max(values, groups, valid=valid), valid)
    mean = group_sum(shifted, groups) / group_count(groups, valid).clamp_min(1)
    return keep(shifted - mean, valid)


def group_deviation(
    values: Tensor, groups: Tensor, *, valid: Tensor | None = None, deviation: Deviation = "sample"
) -> Tensor:
    """Standard deviation of a sequence's group: ``sqrt(Σ (x − mean)² / (n − 1))``, or ``/ n``.

    0 for a group of one and for values that differ by rounding only. Shapes: [B], [B] → [B].

    >>> group_deviation(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), deviation="population")
    tensor([1., 1.])
    """
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    squares = group_sum(group_centre(values, groups, valid=valid).square(), groups)
    spread = (squares / _degrees(group_count(groups, valid), deviation)).sqrt()
    largest = group_max(keep(values, valid).abs(), groups)
    return spread.masked_fill(spread <= noise_floor(values.dtype) * largest, 0.0)


def others_deviation(
    values: Tensor, groups: Tensor, *, valid: Tensor | None = None, deviation: Deviation = "sample"
) -> Tensor:
    """:func:`group_deviation` of the other members of a sequence's group, its own value left out.

    0 where fewer than two others are valid, or they are equal but for rounding. Found from the
    others themselves: the whole group's sum of squares less one's own part would cancel digits.
    Shapes: [B], [B] → [B].

    >>> others_deviation(torch.tensor([9.0, 1.0, 3.0]), torch.tensor([0, 0, 0]))[0]  # of 1 and 3
    tensor(1.4142)
    """
    checks.same_shape("groups", groups, like=values)
    own, other = _siblings(groups)
    if valid is not None:
        own, other = own[valid[other]], other[valid[other]]
    spread = torch.zeros_like(values)
    spread[own] = group_deviation(values[other], own, deviation=deviation)
    return spread


def _siblings(groups: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of two members of a group, as rows: Σ G · (G − 1) of them. Shapes: [B] → [pairs].

    Sorted by group, the members of a sequence's group are the G indices from its first one.
    """
    order = groups.argsort(stable=True)
    ascending = groups[order]
    count, first = group_count(ascending), torch.searchsorted(ascending, ascending)
    place = torch.arange(int(count.sum()), device=groups.device)
    # Index within the group: 0 … G − 1.
    place = place - (count.cumsum(0) - count).repeat_interleave(count)
    own = order.repeat_interleave(count)
    other = order[first.repeat_interleave(count) + place]
    return own[own != other], other[own != other]


def compact(mask: Tensor) -> Tensor:
    """Column order that brings each row's masked-in tokens to the front, in their order.

    ``values.gather(1, compact(mask))`` closes the gaps between the policy's tokens.
    Shapes: [B, T] → [B, T].

    >>> compact(torch.tensor([[False, True, False, True]]))
    tensor([[1, 3, 0, 2]])
    """
    return (~mask).to(torch.int8).argsort(dim=1, stable=True)


def window_sum(values: Tensor, discount: float, *, steps: int | None = None) -> Tensor:
    """``out_t = Σ_{l < steps} discount^l · x_{t + l}`` along the last dimension (all, if None).

    Windows double: ``S_{a+b}(t) = S_a(t) + discount^a · S_b(t + a)``, so the cost is
    T·log(steps) and no loop runs over tokens. Shapes: [B, T] → [B, T].

    >>> window_sum(torch.tensor([[1.0, 1.0, 1.0]]), 0.5)
    tensor([[1.7500, 1.5000, 1.0000]])
    >>> window_sum(torch.tensor([[1.0, 1.0, 1.0]]), 0.5, steps=2)
    tensor([[1.5000, 1.5000, 1.0000]])
    """
    if steps is not None:
        checks.number("steps", steps, low=0)
    remaining = values.shape[-1] if steps is None else min(steps, values.shape[-1])
    total, done = torch.zeros_like(values), 0
    window, width = values, 1
    while remaining:
        if remaining & 1:
            total = total + discount**done * _ahead(window, done)
            done += width
        remaining >>= 1
        window, width = window + discount**width * _ahead(window, width), 2 * width
    return total


def _ahead(values: Tensor, steps: int) -> Tensor:
    """``out_t = x_{t + steps}``, zero past the end."""
    return torch.nn.functional.pad(values, (0, steps))[..., steps:]


def _degrees(count: Tensor, deviation: Deviation) -> Tensor:
    checks.choice("deviation", deviation, known=("sample", "population"))
    return (count - 1 if deviation == "sample" else count).clamp_min(1)
