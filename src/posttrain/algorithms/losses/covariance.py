"""Losses that treat the few tokens apart which drive the entropy down.

In a softmax policy the entropy falls with the covariance of log π and advantage, and almost all of
that covariance sits in a few tokens: likely ones that are praised, unlikely ones that are blamed.
``cov_t = (A_t − mean A) · (log π_old,t − mean log π_old)``, with means over the policy's tokens
(Cui et al., 2025, arXiv:2505.22617).

Which tokens those are is decided once, on the whole batch and with π_old, so that neither
mini-batches nor micro-batches change it. (The authors rank with the current π in each part.) Their
number is ``⌊share · N⌋`` of the policy's N tokens, at least one, as in the authors' code. Equal
covariances are common (a group's advantages take few values, and many a log-prob is exactly 0): a
draw decides among them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.losses.policy import (
    advantages_of,
    bounds_of,
    clip_terms,
    log_ratio_of,
    ratio_loss,
)
from posttrain.algorithms.ops import keep
from posttrain.algorithms.pieces import Loss, piece
from posttrain.types import Batch, Terms

# 2^64 / golden ratio, as a signed number: the multiplier of Fibonacci hashing (Knuth, 6.4).
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The tokens of a batch to treat apart, as numbers that hold for any part of the batch.

    A token is chosen if its covariance lies in [``low``, ``high``], and is above ``sure`` or its
    draw is at most ``last_draw``. Tokens with the same draw are chosen together: those of sequences
    that are wholly alike up to there, with the same prompt, tokens, log-probs and advantage.
    """

    mean_advantage: float
    mean_logprob: float
    low: float
    high: float = math.inf
    sure: float = math.inf
    last_draw: int = torch.iinfo(torch.int64).max

    def tokens(self, batch: Batch) -> Tensor:
        """[B, T] bool: the chosen ones among these sequences."""
        covariance = self.covariance(batch)
        inside = (covariance >= self.low) & (covariance <= self.high) & batch.active
        return inside & ((covariance > self.sure) | (_draw(covariance, batch) <= self.last_draw))

    def covariance(self, batch: Batch) -> Tensor:
        """``(A − mean A) · (log π_old − mean log π_old)``. Shapes: [B, T] → [B, T]."""
        advantages = batch.need("advantages").detach().double() - self.mean_advantage
        return advantages * (batch.need("old_logprobs").detach().double() - self.mean_logprob)


def highest(batch: Batch, *, share: float) -> Choice:
    """The ``⌊share · N⌋`` tokens with the highest covariance, at least one; none that is ≤ 0.

    Among those of the lowest covariance that is still chosen, a draw decides (see :func:`drawn`).
    Shapes: advantages, old_logprobs [B, T].

    >>> batch = Batch.from_rewards([0.0] * 3).replace(
    ...     advantages=torch.tensor([[-2.0], [1.0], [1.0]]),
    ...     old_logprobs=torch.tensor([[-3.0], [-2.0], [-1.0]]))
    >>> highest(batch, share=0.4).tokens(batch).T  # covariances 2, 0, 1
    tensor([[ True, False, False]])
    """
    advantage, logprob = _means(batch)
    choice = Choice(mean_advantage=advantage, mean_logprob=logprob, low=math.inf)
    covariance = choice.covariance(batch)
    eligible = batch.active & (covariance > 0)
    best = covariance[eligible].sort(descending=True).values[: _count(batch, share)]
    if not len(best):
        return choice
    low, places = float(best[-1]), int((best == best[-1]).sum())
    draws = _draw(covariance, batch)[eligible & (covariance == low)].sort().values
    return dataclasses.replace(choice, low=low, sure=low, last_draw=int(draws[places - 1]))


def drawn(batch: Batch, *, share: float, low: float, high: float) -> Choice:
    """``⌊share · N⌋`` tokens drawn from those with a covariance in [low, high], at least one.

    The draw is a hash of the covariance and of the sequence up to the token: as good as random, and
    the same again on resuming, in any order of the sequences, in any part of the batch and with any
    padding. Shapes: advantages, old_logprobs [B, T].

    >>> batch = Batch.from_rewards([0.0] * 3).replace(
    ...     advantages=torch.tensor([[-2.0], [1.0], [1.0]]),
    ...     old_logprobs=torch.tensor([[-3.0], [-2.0], [-1.0]]))
    >>> drawn(batch, share=1.0, low=1.0, high=1.5).tokens(batch).T  # covariances 2, 0, 1
    tensor([[False, False,  True]])
    """
    checks.number("covariance_low", low)
    checks.number("covariance_high", high, low=low)
    advantage, logprob = _means(batch)
    choice = Choice(mean_advantage=advantage, mean_logprob=logprob, low=low, high=high)
    draws = _draw(choice.covariance(batch), batch)[choice.tokens(batch)].sort().values
    draws = draws[: _count(batch, share)]
    return dataclasses.replace(choice, last_draw=int(draws[-1])) if len(draws) else choice


def _kl_cov(logprobs: Tensor, batch: Batch, *, choice: Choice, coefficient: float) -> Terms:
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    chosen, none = choice.tokens(batch), torch.zeros_like(batch.active)
    loss = -log_ratio.exp() * advantages + coefficient * keep(log_ratio.abs(), chosen)
    return _reporting(ratio_loss(loss, log_ratio, batch=batch, low=none, high=none), chosen)


def _kl_cov_for(batch: Batch, *, share: float, coefficient: float) -> Loss:
    checks.number("coefficient", coefficient, low=0.0)
    return functools.partial(_kl_cov, choice=highest(batch, share=share), coefficient=coefficient)


@piece(optimiser_steps="several", whole_batch=_kl_cov_for)
def kl_cov(
    logprobs: Tensor, batch: Batch, *, share: float = 2e-4, coefficient: float = 1.0
) -> Terms:
    """KL-Cov: ``ℓ = −ρ A``, and ``+ β |log ρ|`` for the tokens of the highest covariance.

    Cui et al., 2025, arXiv:2505.22617; their code has ``|log ρ|`` for the divergence from π_old.
    ``share`` of the tokens are held back so (see :func:`highest`), ``coefficient`` is β. In the
    first optimiser step of a batch π is π_old and nothing is held back: take several.
    Called by itself, it looks at ``batch`` as the whole batch. Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([0.0] * 3).replace(
    ...     advantages=torch.tensor([[-2.0], [1.0], [1.0]]),
    ...     old_logprobs=torch.tensor([[-3.0], [-2.0], [-1.0]]))
    >>> kl_cov(batch.old_logprobs - 0.5, batch).loss.T  # 2 ρ + 1/2, then −ρ, with ρ = exp(−1/2)
    tensor([[ 1.7131, -0.6065, -0.6065]])
    """
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    return _kl_cov_for(batch, share=share, coefficient=coefficient)(logprobs, batch)


def _clip_cov(
    logprobs: Tensor, batch: Batch, *, choice: Choice, bounds: tuple[float, float]
) -> Terms:
    advantages, log_ratio = advantages_of(logprobs, batch), log_ratio_of(logprobs, batch)
    terms = clip_terms(log_ratio, advantages, batch=batch, low=bounds[0], high=bounds[1])
    chosen = choice.tokens(batch)
    return _reporting(dataclasses.replace(terms, loss=keep(terms.loss, ~chosen)), chosen)


def _clip_cov_for(
    batch: Batch,
    *,
    share: float,
    covariance_low: float,
    covariance_high: float,
    clip_low: float,
    clip_high: float,
) -> Loss:
    choice = drawn(batch, share=share, low=covariance_low, high=covariance_high)
    return functools.partial(_clip_cov, choice=choice, bounds=bounds_of(clip_low, clip_high))


@piece(zero_with_advantage=True, whole_batch=_clip_cov_for)
def clip_cov(
    logprobs: Tensor,
    batch: Batch,
    *,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Terms:
    """Clip-Cov: PPO's clipped surrogate, and 0 for a few tokens of high covariance.

    ``ℓ = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)``, but 0, with its gradient, where the token
    was drawn (see :func:`drawn`) from those with a covariance in the range given (Cui et al., 2025,
    arXiv:2505.22617). Called by itself, it looks at ``batch`` as the whole batch.
    Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([0.0] * 3).replace(
    ...     advantages=torch.tensor([[-2.0], [1.0], [1.0]]),
    ...     old_logprobs=torch.tensor([[-3.0], [-2.0], [-1.0]]))
    >>> clip_cov(batch.old_logprobs, batch, covariance_low=1.5).loss.T  # covariances 2, 0, 1
    tensor([[ 0., -1., -1.]])
    """
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    loss = _clip_cov_for(
        batch,
        share=share,
        covariance_low=covariance_low,
        covariance_high=covariance_high,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return loss(logprobs, batch)


def _reporting(terms: Terms, chosen: Tensor) -> Terms:
    means = {**terms.means, "chosen": chosen.to(terms.loss.dtype)}
    return dataclasses.replace(terms, means=means)


def _means(batch: Batch) -> tuple[float, float]:
    """The mean advantage and the mean log π_old of the policy's tokens."""
    means = []
    for name in ("advantages", "old_logprobs"):
        checks.finite(name, batch.need(name), where=batch.active)
        means.append(_mean(batch.need(name).detach()[batch.active].double()))
    return means[0], means[1]


def _mean(values: Tensor) -> float:
    """The mean from an exact sum: the order of the values changes no bit of it.

    Of equal values the mean is exactly that value, because an anchor is subtracted.
    """
    if not len(values):
        return 0.0
    anchor = values.max()
    return float(anchor) + math.fsum((values - anchor).tolist()) / len(values)


def _count(batch: Batch, share: float) -> int:
    checks.number("share", share, above=0.0, high=1.0)
    return max(int(share * int(batch.active.sum())), 1)


def _draw(covariance: Tensor, batch: Batch) -> Tensor:
    """A whole number for each token, as good as random. Shapes: [B, T] → [B, T], int64.

    A hash of its covariance and of its sequence up to it: tokens with their positions, and π_old
    of the policy's tokens. Integer sums wrap around and do not round, so that padding and the
    order of addition change no bit, on any device.
    """
    active, old = batch.active, batch.need("old_logprobs").detach().double()
    real = active if batch.attention is None else batch.attention
    logprobs = torch.where(active, old, 0.0).view(torch.int64)
    each = _mixed(_mixed(_mixed(logprobs) + batch.tokens) + real.cumsum(1))
    so_far = torch.where(real, each, 0).cumsum(1)
    return _mixed(_mixed(covariance.view(torch.int64)) + so_far)


def _mixed(bits: Tensor) -> Tensor:
    """An invertible hash of 64-bit integers.

    Two rounds: after one, a difference in the low half would survive in a sum of hashes.
    """
    for _ in range(2):
        bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * GOLDEN
    return bits
