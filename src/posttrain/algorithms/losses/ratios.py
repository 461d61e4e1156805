"""What the losses of a ratio share: ``ρ = π / π_old``, the clip, and what each token reports."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.diagnostics import ratio_terms
from posttrain.algorithms.ops import keep
from posttrain.types import Batch, Terms

# exp(±20) is 5e8: far past any clip range, finite in float32. A ratio held there has no gradient.
MAX_LOG_RATIO = 20.0


def advantages_of(logprobs: Tensor, batch: Batch) -> Tensor:
    """The advantages, held constant, 0 where nothing counts. Shapes: [B, T] → [B, T]."""
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    return keep(batch.need("advantages").detach(), batch.active)


def log_ratio_of(logprobs: Tensor, batch: Batch) -> Tensor:
    """``log ρ``, with the old policy held constant: a ratio to itself would have no gradient."""
    difference = keep(logprobs - batch.need("old_logprobs").detach(), batch.active)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounds_of(clip_low: float, clip_high: float) -> tuple[float, float]:
    """``1 − ε_low`` and ``1 + ε_high``."""
    checks.number("clip_low", clip_low, low=0.0, high=1.0)
    checks.number("clip_high", clip_high, low=0.0)
    return 1 - clip_low, 1 + clip_high


def clip_terms(
    log_ratio: Tensor, advantages: Tensor, *, batch: Batch, low: float, high: float
) -> Terms:
    """The clipped surrogate: ``ℓ = −min(ρ A, clip(ρ, low, high) A)``. Shapes: [B, T] → [B, T]."""
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    stopped_low = (ratio < low) & (advantages < 0)
    stopped_high = (ratio > high) & (advantages > 0)
    return ratio_loss(-objective, log_ratio, batch=batch, low=stopped_low, high=stopped_high)


def ratio_loss(
    loss: Tensor, log_ratio: Tensor, *, batch: Batch, low: Tensor, high: Tensor
) -> Terms:
    """Terms of a loss with what its ratios report; ``low`` and ``high`` mark stopped tokens."""
    active = batch.active
    means = ratio_terms(log_ratio, low=low, high=high, active=active)
    return Terms(loss=keep(loss, active), means=means, maxima={"ratio": means["ratio"]})
