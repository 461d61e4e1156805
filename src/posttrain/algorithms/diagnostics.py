"""Diagnostics that add: a loss reports them per token, micro-batches sum them, one place divides.

Effective sample size and explained variance are not means, so what is added is their moments, and
:meth:`Tally.summary` forms them at the end. No split of the batch changes a reported number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.advantages.baselines import sequence_returns
from posttrain.algorithms.ops import group_deviation, group_index, keep
from posttrain.types import Batch, Terms


def ratio_terms(
    log_ratio: Tensor, *, low: Tensor, high: Tensor, active: Tensor
) -> dict[str, Tensor]:
    """What every ratio loss reports for each token, ready for ``Terms.means``.

    ``approx_kl`` is KL(π_old ‖ π) by ``ρ − 1 − log ρ``; ``clip_low`` and ``clip_high`` are 1 where
    the loss has stopped the token below or above. Shapes: [B, T] → [B, T] each.

    >>> log_ratio = torch.tensor([[2.0]]).log()
    >>> terms = ratio_terms(log_ratio, low=log_ratio < 0, high=log_ratio > 0,
    ...                     active=torch.tensor([[True]]))
    >>> {name: round(value.item(), 4) for name, value in terms.items()}
    {'ratio': 2.0, 'ratio_squared': 4.0, 'approx_kl': 0.3069, 'clip_low': 0.0, 'clip_high': 1.0}
    """
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    means = {
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "approx_kl": (log_ratio.expm1() - log_ratio).clamp_min(0),
        "clip_low": low.to(ratio.dtype),
        "clip_high": high.to(ratio.dtype),
    }
    return {name: keep(value, active) for name, value in means.items()}


def value_terms(
    values: Tensor, returns: Tensor, *, clipped: Tensor, active: Tensor
) -> dict[str, Tensor]:
    """What every value loss reports for each token: moments of return and error, and clipping.

    Shapes: [B, T] → [B, T] each.

    >>> one = torch.ones(1, 1)
    >>> terms = value_terms(one, 3 * one, clipped=one < 0, active=one > 0)
    >>> terms["value_error"].item(), terms["return"].item()
    (2.0, 3.0)
    """
    error = returns - values.detach()
    means = {
        "value": values.detach(),
        "return": returns,
        "return_squared": returns.square(),
        "value_error": error,
        "value_error_squared": error.square(),
        "value_clip": clipped.to(values.dtype),
    }
    return {name: keep(value, active) for name, value in means.items()}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Sums of diagnostics over tokens: ``tally(terms, active) + tally(more, active)``.

    >>> ones = torch.ones(1, 2)
    >>> one = tally(Terms(loss=ones, means={"entropy": ones}), ones.bool())
    >>> (one + one).summary()
    {'entropy': 1.0}
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def __add__(self, other: Tally) -> Tally:
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Tally(sums=sums, maxima=maxima, count=self.count + other.count)

    def summary(self) -> dict[str, float]:
        """Means over tokens, maxima, and what moments give; empty when no token was active."""
        count = float(self.count)
        if count == 0:
            return {}
        means = {name: float(value) / count for name, value in self.sums.items()}
        if "ratio" in means:
            means |= _ratio_summary(means)
        if "value_error" in means:
            means |= _value_summary(means)
        hidden = ("ratio_squared", "return_squared", "value_error_squared")
        means |= {f"{name}_max": float(value) for name, value in self.maxima.items()}
        return {name: value for name, value in means.items() if name not in hidden}


def tally(terms: Terms, active: Tensor) -> Tally:
    """Sum a micro-batch's diagnostics in float64. Shapes: [B, T] → scalars.

    >>> mask = torch.tensor([[True, False]])
    >>> terms = Terms(loss=torch.zeros(1, 2), means={"x": torch.tensor([[3.0, 9.0]])})
    >>> tally(terms, mask).summary()
    {'x': 3.0}
    """
    checks.same_shape("active", active, like=terms.loss)
    sums = {name: keep(value, active).double().sum() for name, value in terms.means.items()}
    floor = torch.finfo(torch.float64).min
    maxima = {
        name: value.double().masked_fill(~active, floor).amax()
        for name, value in terms.maxima.items()
    }
    return Tally(sums=sums, maxima=maxima, count=active.sum().double())


def share_without_signal(batch: Batch) -> float:
    """Share of groups whose valid members all got the same return: they teach nothing.

    Shapes: rewards, groups [B] → a number in [0, 1].

    >>> share_without_signal(Batch.from_rewards([1.0, 1.0, 0.0, 1.0], groups=[0, 0, 1, 1]))
    0.5
    """
    groups, returns = batch.need("groups"), sequence_returns(batch)
    silent = group_deviation(returns, groups, valid=batch.valid) == 0
    index, size = group_index(groups)
    per_group = silent.new_zeros(size).index_put((index,), silent)
    return float(per_group.double().mean()) if size else 0.0


def _ratio_summary(means: Mapping[str, float]) -> dict[str, float]:
    """Effective sample size ``(Σρ)² / (n Σρ²)``, in (0, 1], and the variance of the ratio."""
    square = means["ratio_squared"]
    return {
        "effective_sample_size": means["ratio"] ** 2 / square if square > 0 else 0.0,
        "ratio_variance": max(square - means["ratio"] ** 2, 0.0),
    }


def _value_summary(means: Mapping[str, float]) -> dict[str, float]:
    """Explained variance ``1 − Var(R − V) / Var(R)``: 1 is perfect, ≤ 0 no better than the mean."""
    returns = means["return_squared"] - means["return"] ** 2
    errors = means["value_error_squared"] - means["value_error"] ** 2
    noise = 1e-12 * means["return_squared"]
    return {"explained_variance": 1 - errors / returns if returns > noise else 0.0}
