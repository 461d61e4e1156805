"""Policy losses: ``(logprobs, batch, *, options) -> Terms``, one term per token, never a mean.

``logprobs`` [B, T] are the current policy's, with gradient; ``batch`` holds the rest, frozen. The
ratio is ``ρ = π / π_old = exp(logprobs − old_logprobs)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.diagnostics import ratio_terms
from posttrain.algorithms.ops import keep
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch, Terms

# exp(±20) is 5e8: far past any clip range, finite in float32. A ratio held there has no gradient.
MAX_LOG_RATIO = 20.0


@piece(zero_with_advantage=True, optimiser_steps="one")
def naive(logprobs: Tensor, batch: Batch) -> Terms:
    """The policy gradient itself: ``ℓ = −A · log π`` (REINFORCE; Williams, 1992).

    Right for one optimiser step on fresh data; it knows nothing of π_old. Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([2.0]).replace(advantages=torch.tensor([[2.0]]))
    >>> naive(torch.tensor([[0.5]]).log(), batch).loss
    tensor([[1.3863]])
    """
    advantages, active = advantages_of(logprobs, batch), batch.active
    loss = -advantages * keep(logprobs, active)
    if batch.old_logprobs is None:
        return Terms(loss=loss)
    none = torch.zeros_like(active)
    return ratio_loss(loss, log_ratio_of(logprobs, batch), batch=batch, low=none, high=none)


@piece(zero_with_advantage=True)
def unclipped(logprobs: Tensor, batch: Batch) -> Terms:
    """Importance sampling: ``ℓ = −ρ · A``. At ρ = 1 its gradient is that of :func:`naive`.

    Shapes: [B, T] → [B, T].

    >>> old = torch.tensor([[0.5]]).log()
    >>> batch = Batch.from_rewards([1.0]).replace(advantages=torch.ones(1, 1), old_logprobs=old)
    >>> unclipped(torch.tensor([[0.7]]).log(), batch).loss
    tensor([[-1.4000]])
    """
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    none = torch.zeros_like(batch.active)
    return ratio_loss(-log_ratio.exp() * advantages, log_ratio, batch=batch, low=none, high=none)


@piece(zero_with_advantage=True)
def clipped(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Terms:
    """PPO's and GRPO's surrogate: ``ℓ = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)``.

    Schulman et al., 2017, arXiv:1707.06347; separate bounds after DAPO, arXiv:2503.14476. A token
    that has moved further than its bound in the direction of its advantage gets no gradient; one
    that moved the wrong way still does. Shapes: [B, T] → [B, T].

    >>> old = torch.tensor([[0.4], [0.3]]).log()
    >>> advantages = torch.tensor([[1.0], [-1.0]])
    >>> batch = Batch.from_rewards([1.0, 0.0]).replace(advantages=advantages, old_logprobs=old)
    >>> -clipped(torch.tensor([[0.6], [0.15]]).log(), batch).loss.T
    tensor([[ 1.2000, -0.8000]])
    """
    low, high = bounds_of(clip_low, clip_high)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    return clip_terms(log_ratio, advantages, batch=batch, low=low, high=high)


@piece(zero_with_advantage=True)
def dual_clip(
    logprobs: Tensor,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    floor: float = 3.0,
) -> Terms:
    """:func:`clipped`, bounded below where A < 0: ``objective = max(min(ρA, clip(ρ)A), c·A)``.

    Without it a token with A < 0 whose probability has grown has an unbounded loss (Ye et al.,
    2020, arXiv:1912.09729). ``floor`` is c > 1. Shapes: [B, T] → [B, T].

    >>> old = torch.tensor([[0.1]]).log()
    >>> batch = Batch.from_rewards([0.0]).replace(advantages=-torch.ones(1, 1), old_logprobs=old)
    >>> dual_clip(torch.tensor([[0.9]]).log(), batch).loss
    tensor([[3.]])
    """
    checks.number("floor", floor, above=1.0)
    low, high = bounds_of(clip_low, clip_high)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    terms = clip_terms(log_ratio, advantages, batch=batch, low=low, high=high)
    bound = -floor * advantages
    cut = (advantages < 0) & (terms.loss > bound)
    means = dict(terms.means)
    means["clip_high"] = torch.maximum(means["clip_high"], cut.to(bound.dtype))
    return Terms(loss=torch.where(cut, bound, terms.loss), means=means, maxima=terms.maxima)


@piece(steered=True)
def penalised(logprobs: Tensor, batch: Batch, *, coefficient: float = 1.0) -> Terms:
    """The KL-penalty form of PPO: ``ℓ = −ρ A + β · KL(π_old ‖ π)`` (arXiv:1707.06347, §4).

    The tokens come from π_old, so ``ρ − 1 − log ρ`` estimates that KL without bias, in value and in
    gradient. β can follow a target: ``kl.Coefficient(rule="doubling")``.
    Shapes: [B, T] → [B, T].

    >>> old = torch.tensor([[0.5]]).log()
    >>> batch = Batch.from_rewards([1.0]).replace(advantages=torch.ones(1, 1), old_logprobs=old)
    >>> penalised(torch.tensor([[0.7]]).log(), batch).loss  # −1.4 + (1.4 − 1 − log 1.4)
    tensor([[-1.3365]])
    """
    checks.number("coefficient", coefficient, low=0.0)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    divergence = (log_ratio.expm1() - log_ratio).clamp_min(0)
    none = torch.zeros_like(batch.active)
    loss = -log_ratio.exp() * advantages + coefficient * divergence
    return ratio_loss(loss, log_ratio, batch=batch, low=none, high=none)


@piece(zero_with_advantage=True)
def sequence_clipped(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Terms:
    """One ratio for the whole sequence (GSPO; Zheng et al., 2025, arXiv:2507.18071).

    ``s_i = exp(mean_t (log π − log π_old))`` replaces every ρ_t in the clipped surrogate: the
    reward is the sequence's, so the correction is too. The token form is used,
    ``s_i · π_t / sg(π_t)``: the same value and gradient, and each token keeps its own term.
    Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(
    ...     tokens=torch.zeros(1, 2), mask=torch.ones(1, 2).bool(),
    ...     advantages=torch.ones(1, 2), old_logprobs=torch.zeros(1, 2))
    >>> sequence_clipped(torch.tensor([[0.5, -0.5]]), batch).loss  # the two moves cancel
    tensor([[-1., -1.]])
    """
    low, high = bounds_of(clip_low, clip_high)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    lengths = batch.active.sum(dim=1, keepdim=True).clamp_min(1)
    mean = log_ratio.sum(dim=1, keepdim=True) / lengths
    sequence = keep(mean.detach() + log_ratio - log_ratio.detach(), batch.active)
    return clip_terms(sequence, advantages, batch=batch, low=low, high=high)


@piece(zero_with_advantage=True)
def geometric_mean(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Terms:
    """The geometric mean of clipped ratios (GMPO; Zhao et al., 2025, arXiv:2507.20673).

    ``ℓ = −A · exp(mean_t l_t)``, where ``l_t = min(log ρ_t, ε_high)`` if A > 0 and
    ``max(log ρ_t, −ε_low)`` if A < 0: one outlier moves a geometric mean little, so the range can
    be wide, ρ from e^−0.4 to e^0.4. Each token keeps its own term, as in :func:`sequence_clipped`:
    the value of its sequence's, and the gradient through its own l_t, none where it is stopped.
    Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(
    ...     tokens=torch.zeros(1, 2), mask=torch.ones(1, 2).bool(),
    ...     advantages=torch.ones(1, 2), old_logprobs=torch.zeros(1, 2))
    >>> geometric_mean(torch.tensor([[0.2, 5.0]]), batch).loss  # −exp((0.2 + 0.4) / 2)
    tensor([[-1.3499, -1.3499]])
    """
    checks.number("clip_low", clip_low, low=0.0)
    checks.number("clip_high", clip_high, low=0.0)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    low = (log_ratio < -clip_low) & (advantages < 0)
    high = (log_ratio > clip_high) & (advantages > 0)
    held = log_ratio.masked_fill(low, -clip_low).masked_fill(high, clip_high)
    lengths = batch.active.sum(dim=1, keepdim=True).clamp_min(1)
    mean = (held.sum(dim=1, keepdim=True) / lengths).detach()
    loss = -(mean + held - held.detach()).exp() * advantages
    return ratio_loss(loss, log_ratio, batch=batch, low=low, high=high)


@piece(zero_with_advantage=True)
def cispo(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Terms:
    """Clip the weight, not the token: ``ℓ = −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) · A · log π``.

    MiniMax-M1, 2025, arXiv:2506.13585. Every token keeps a gradient, so rare tokens that open a
    chain of thought are not silenced. ``clip_low=1`` leaves ρ unbounded below. Shapes: [B, T] →
    [B, T].

    >>> old = torch.tensor([[0.1]]).log()
    >>> batch = Batch.from_rewards([1.0]).replace(advantages=torch.ones(1, 1), old_logprobs=old)
    >>> cispo(torch.tensor([[0.9]]).log(), batch).loss  # −5 · log 0.9
    tensor([[0.5268]])
    """
    low, high = bounds_of(clip_low, clip_high)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(low, high) * advantages * keep(logprobs, batch.active)
    return ratio_loss(loss, log_ratio, batch=batch, low=ratio < low, high=ratio > high)


@piece(zero_with_advantage=True)
def sapo(
    logprobs: Tensor,
    batch: Batch,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Terms:
    """A soft gate instead of a clip: ``ℓ = −(4/τ) σ(τ (ρ − 1)) · A`` (SAPO; arXiv:2511.20347).

    Its gradient weight, ``4 σ (1 − σ)``, is 1 at ρ = 1 and fades smoothly on both sides; τ is
    larger where A is not positive, so that pushes down fade sooner. Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(
    ...     advantages=torch.ones(1, 1), old_logprobs=torch.zeros(1, 1))
    >>> sapo(torch.zeros(1, 1), batch).loss  # at ρ = 1: −4 · 1/2
    tensor([[-2.]])
    """
    checks.number("temperature_positive", temperature_positive, above=0.0)
    checks.number("temperature_negative", temperature_negative, above=0.0)
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    temperature = torch.full_like(advantages, temperature_negative)
    temperature = temperature.masked_fill(advantages > 0, temperature_positive)
    gate = torch.sigmoid(temperature * log_ratio.expm1())
    none = torch.zeros_like(batch.active)
    return ratio_loss(
        -4 / temperature * gate * advantages, log_ratio, batch=batch, low=none, high=none
    )


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
