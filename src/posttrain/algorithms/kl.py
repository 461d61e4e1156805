"""Divergence from another policy: sampled estimators, the exact value, and its coefficient.

Tokens are sampled from the policy π. With ``d = log π_ref − log π`` of the sampled token:

=========  ========================================  ==========================================
estimator  reverse, KL(π ‖ π_ref)                    forward, KL(π_ref ‖ π)
=========  ========================================  ==========================================
``k1``     ``−d``: unbiased, noisy, can be negative  ``e^d d``: likewise
``k2``     ``d² / 2``: biased, low variance          ``d² / 2``
``k3``     ``e^d − d − 1``: unbiased, never < 0      ``e^d d − e^d + 1``: likewise
=========  ========================================  ==========================================

See Schulman, "Approximating KL divergence" (2020). As a *loss*, differentiate with care: the tokens
are drawn from π held still, so the expected gradient of an estimate k is ``E_π[∇k]`` and not
``∇E_π[k] = E_π[∇k + k ∇log π]``. With ``∇d = −∇log π`` and ``E_π[∇log π] = 0``, reverse:
``∇k1 = ∇log π``, 0 on average; ``∇k2 = −d ∇log π``, the gradient of KL(π ‖ π_ref);
``∇k3 = (1 − e^d) ∇log π``, on average ``−E_ref[∇log π]``, the gradient of KL(π_ref ‖ π). Weighted
by ``ρ = π / π_old``, through which the gradient flows, all of ``∇E_π[k]`` is there: of k1 and k3
that is the gradient of the divergence itself. ``choices.GRADIENTS`` has them all.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.choices import Direction, Estimator, Rule
from posttrain.algorithms.ops import log_softmax


def estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: Estimator = "k3",
    direction: Direction = "reverse",
) -> Tensor:
    """KL estimate for each token, from the two log-probabilities of the token sampled from π.

    The formulas are in the table above; k3 uses ``expm1``, so it stays exact and never falls below
    zero when the policies almost agree. Shapes: [B, T], [B, T] → [B, T].

    >>> import torch
    >>> estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())  # 1/2 + log 2 − 1
    tensor([0.1931])
    """
    checks.choice("estimator", estimator, known=("k1", "k2", "k3"))
    checks.choice("direction", direction, known=("reverse", "forward"))
    checks.same_shape("ref_logprobs", ref_logprobs, like=logprobs)
    d = ref_logprobs - logprobs
    if estimator == "k2":
        return d.square() / 2
    if direction == "reverse" and estimator == "k1":
        return -d
    d = d.clamp_max(50.0)  # e^50 = 5e21 is larger than any useful ratio, and finite in float32
    if direction == "forward":
        d = d.clamp_min(-50.0)  # below −50, k1 is 0 and k3 is 1 up to rounding
        # e^d d − e^d + 1 = e^d (e^−d + d − 1): the stable k3 of the opposite direction, reweighted.
        return d.exp() * (d if estimator == "k1" else ((-d).expm1() + d).clamp_min(0))
    return (d.expm1() - d).clamp_min(0)


def exact(logits: Tensor, ref_logits: Tensor, *, direction: Direction = "reverse") -> Tensor:
    """KL over the whole vocabulary: ``Σ_v p(v) (log p(v) − log q(v))``, in nats.

    ``reverse`` is KL(π ‖ π_ref), ``forward`` is KL(π_ref ‖ π). Tokens that p cannot emit add 0; a
    token that p can emit and q cannot makes it infinite. Shapes: [..., V], [..., V] → [...].

    >>> import torch
    >>> exact(torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.7, 0.2, 0.1]).log())
    tensor(0.0291)
    """
    checks.choice("direction", direction, known=("reverse", "forward"))
    checks.same_shape("ref_logits", ref_logits, like=logits)
    p, q = log_softmax(logits), log_softmax(ref_logits)
    return _divergence(p, q) if direction == "reverse" else _divergence(q, p)


def jensen_shannon(logits: Tensor, ref_logits: Tensor, *, beta: float = 0.5) -> Tensor:
    """``β KL(π_ref ‖ m) + (1 − β) KL(π ‖ m)`` with ``m = β π_ref + (1 − β) π``, in nats.

    The generalised Jensen–Shannon divergence (GKD; Agarwal et al., 2023, arXiv:2306.13649). Divided
    by β it tends to the forward KL(π_ref ‖ π) as β → 0, divided by 1 − β to the reverse KL(π ‖
    π_ref) as β → 1; at β = 0 and 1 it is these KLs themselves, as GKD has it.
    Shapes: [..., V], [..., V] → [...].

    >>> import torch
    >>> one, other = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 1.0]).log()
    >>> jensen_shannon(one, other)  # nothing in common: log 2, its largest value
    tensor(0.6931)
    """
    checks.number("beta", beta, low=0.0, high=1.0)
    if beta in (0.0, 1.0):
        return exact(logits, ref_logits, direction="reverse" if beta else "forward")
    checks.same_shape("ref_logits", ref_logits, like=logits)
    own, ref = log_softmax(logits), log_softmax(ref_logits)
    # e^−10,000 is 0 too, and unlike that of −∞ the logarithm of a sum of two has a gradient.
    parts = (math.log(1 - beta) + own.clamp_min(-1e4), math.log(beta) + ref.clamp_min(-1e4))
    mixture = torch.logaddexp(*parts)
    return beta * _divergence(ref, mixture) + (1 - beta) * _divergence(own, mixture)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """``Σ_v e^p (p − q)`` of log-probabilities; tokens that p cannot emit add 0."""
    probabilities = p.exp()
    return (probabilities * (p - q).masked_fill(probabilities == 0, 0.0)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """β, fixed or steered towards a target KL.

    ``proportional`` multiplies by ``1 + clip(KL / target − 1, ±0.2) · min(n / horizon, 1)`` after
    n sequences (Ziegler et al., 2019, arXiv:1909.08593). ``doubling`` doubles β above 1.5 · target
    and halves it below target / 1.5 (Schulman et al., 2017, arXiv:1707.06347).

    >>> Coefficient(value=0.1, rule="doubling", target=0.02).update(0.05).value
    0.2
    >>> Coefficient(value=0.1).update(0.05).value
    0.1
    """

    value: float
    rule: Rule = "fixed"
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        checks.number("value", self.value, low=0.0)
        checks.choice("rule", self.rule, known=("fixed", "proportional", "doubling"))
        checks.number("horizon", self.horizon, low=1)
        if self.rule == "fixed":
            if self.target is not None:
                raise ValueError("target: a fixed coefficient ignores it; set rule or drop target")
            return
        if self.target is None:
            raise ValueError(f"target: rule {self.rule!r} needs the KL to steer to, in nats")
        checks.number("target", self.target, above=0.0)
        checks.number("value", self.value, above=0.0)  # 0 would stay 0 under multiplication

    def update(self, kl: float, *, num_sequences: int = 1) -> Coefficient:
        """The coefficient after ``num_sequences`` sequences showed a mean divergence of ``kl``."""
        if self.target is None:
            return self
        checks.number("kl", kl)
        checks.number("num_sequences", num_sequences, low=0)
        if self.rule == "doubling":
            factor = 2.0 if kl > 1.5 * self.target else 0.5 if kl < self.target / 1.5 else 1.0
        else:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            factor = 1 + error * min(num_sequences / self.horizon, 1.0)
        return dataclasses.replace(self, value=self.value * factor)
