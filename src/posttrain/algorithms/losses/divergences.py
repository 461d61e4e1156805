"""The loss of distillation over the whole vocabulary: the exact divergence from a teacher."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.kl import jensen_shannon
from posttrain.algorithms.losses.policy import clipped, log_ratio_of, ratio_loss
from posttrain.algorithms.ops import keep
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch, Terms


@piece(divergence=lambda *, beta, **_: functools.partial(jensen_shannon, beta=beta))
def teacher_divergence(
    logprobs: Tensor, batch: Batch, *, beta: float = 1.0, reward: float = 0.0
) -> Terms:
    """``ℓ_t = D_β(π_teacher, π)`` of the whole vocabulary at every token that the policy chose.

    Reverse KL at β = 1, forward KL at β = 0, the generalised Jensen–Shannon divergence between
    (GKD; Agarwal et al., 2023, arXiv:2306.13649): the gradient is the divergence's own in the
    states that were sampled, without the noise of the sampled token. The learner computes it, in
    ``batch.divergence``. ``reward`` adds that much of the :func:`clipped` loss of the advantages.
    Shapes: logprobs, divergence [B, T] → [B, T].

    >>> batch = Batch.from_rewards([0.0]).replace(
    ...     divergence=torch.tensor([[0.25]]), old_logprobs=torch.zeros(1, 1))
    >>> teacher_divergence(torch.zeros(1, 1), batch).loss
    tensor([[0.2500]])
    """
    checks.number("beta", beta, low=0.0, high=1.0)
    checks.number("reward", reward, low=0.0)
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    divergence = keep(batch.need("divergence"), batch.active)
    if reward:
        terms = clipped(logprobs, batch)
        terms = dataclasses.replace(terms, loss=divergence + reward * terms.loss)
    else:
        none = torch.zeros_like(batch.active)
        ratio = log_ratio_of(logprobs, batch)
        terms = ratio_loss(divergence, ratio, batch=batch, low=none, high=none)
    return dataclasses.replace(terms, means={**terms.means, "divergence": divergence.detach()})
