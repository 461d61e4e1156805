"""The whole objective of one optimiser step, put together from its pieces."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.choices import Direction, Estimator
from posttrain.algorithms.kl import estimate
from posttrain.algorithms.losses.policy import log_ratio_of
from posttrain.algorithms.ops import keep
from posttrain.types import Batch, Terms


def with_correction(terms: Terms, batch: Batch) -> Terms:
    """Multiply the policy term by ``batch.correction``, if there is one. Shapes: [B, T] → [B, T].

    >>> import torch
    >>> batch = Batch.from_rewards([0.0]).replace(correction=torch.tensor([[0.5]]))
    >>> with_correction(Terms(loss=torch.tensor([[4.0]])), batch).loss
    tensor([[2.]])
    """
    if batch.correction is None:
        return terms
    correction = keep(batch.correction.detach(), batch.active)
    loss = terms.loss * correction
    means = {**terms.means, "correction": correction}
    return dataclasses.replace(terms, loss=loss, means=means)


def with_kl(
    terms: Terms,
    logprobs: Tensor,
    *,
    batch: Batch,
    coefficient: float,
    estimator: Estimator = "k3",
    direction: Direction = "reverse",
    weighted: bool = False,
) -> Terms:
    """Add ``β · KL(π, π_ref)`` of every token: the penalty is part of the loss.

    ``weighted`` multiplies it by ``ρ = π / π_old`` and lets the gradient through ρ, so that its
    expected gradient is that of the estimator's mean under π, also where the tokens come from an
    older policy: that of the divergence itself, with k1 and k3 (DeepSeek-V3.2, 2025,
    arXiv:2512.02556). Without, it is what ``choices.GRADIENTS`` says.
    Shapes: logprobs, batch.ref_logprobs [B, T] → [B, T].

    >>> import torch
    >>> batch = Batch.from_rewards([0.0]).replace(ref_logprobs=torch.tensor([[0.25]]).log())
    >>> zero = Terms(loss=torch.zeros(1, 1))
    >>> with_kl(zero, torch.tensor([[0.5]]).log(), batch=batch, coefficient=2.0).loss
    tensor([[0.3863]])
    """
    checks.number("coefficient", coefficient, low=0.0)
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    active, ref = batch.active, batch.need("ref_logprobs").detach()
    kl = estimate(
        keep(logprobs, active), keep(ref, active), estimator=estimator, direction=direction
    )
    if weighted:
        kl = log_ratio_of(logprobs, batch).exp() * kl
    terms = dataclasses.replace(terms, means={**terms.means, "kl": kl.detach()})
    return _plus(terms, coefficient * kl, part="kl")


def with_entropy(terms: Terms, entropy: Tensor, *, batch: Batch, coefficient: float) -> Terms:
    """Subtract ``c_H · H`` of every token: a bonus for staying undecided. Shapes: [B, T] → [B, T].

    >>> import torch
    >>> zero = Terms(loss=torch.zeros(1, 1))
    >>> batch = Batch.from_rewards([0.0])
    >>> with_entropy(zero, torch.tensor([[0.5]]), batch=batch, coefficient=0.1).loss
    tensor([[-0.0500]])
    """
    checks.number("coefficient", coefficient)
    checks.same_shape("entropy", entropy, like=batch.tokens)
    entropy = keep(entropy, batch.active)
    terms = dataclasses.replace(terms, means={**terms.means, "entropy": entropy.detach()})
    return _plus(terms, -coefficient * entropy, part="entropy") if coefficient else terms


def with_values(terms: Terms, values: Terms, *, coefficient: float) -> Terms:
    """Add ``c_V · ℓ_V`` of every token: policy and critic learn in one step. Shapes: [B, T].

    >>> import torch
    >>> policy, critic = Terms(loss=torch.tensor([[1.0]])), Terms(loss=torch.tensor([[4.0]]))
    >>> with_values(policy, critic, coefficient=0.5).loss
    tensor([[3.]])
    """
    checks.number("coefficient", coefficient, low=0.0)
    terms = dataclasses.replace(
        terms, means={**terms.means, **values.means}, maxima={**terms.maxima, **values.maxima}
    )
    return _plus(terms, coefficient * values.loss, part="value")


def _plus(terms: Terms, addend: Tensor, *, part: str) -> Terms:
    """The terms with one more summand; the first one is called ``policy``."""
    parts = {**(terms.parts or {"policy": terms.loss}), part: addend}
    return dataclasses.replace(terms, loss=terms.loss + addend, parts=parts)


def with_mismatch(terms: Terms, batch: Batch) -> Terms:
    """Report ``|log π_old − log π_sampler|`` of every token: how far trainer and engine disagree.

    Shapes: [B, T] → [B, T].

    >>> import torch
    >>> batch = Batch.from_rewards([0.0]).replace(
    ...     old_logprobs=torch.tensor([[-1.0]]), sampler_logprobs=torch.tensor([[-1.5]]))
    >>> with_mismatch(Terms(loss=torch.zeros(1, 1)), batch).means["mismatch"]
    tensor([[0.5000]])
    """
    if batch.sampler_logprobs is None or batch.old_logprobs is None:
        return terms
    mismatch = keep((batch.old_logprobs - batch.sampler_logprobs).detach().abs(), batch.active)
    return dataclasses.replace(
        terms,
        means={**terms.means, "mismatch": mismatch},
        maxima={**terms.maxima, "mismatch": mismatch},
    )
