"""Importance correction for sampler-trainer mismatch: a factor beside the loss, not inside it.

The engine that sampled a token and the trainer that learns from it disagree a little on its
log-probability (kernels, precision, an older version). ``c = π_old / π_sampler`` undoes that; it
multiplies the policy term and carries no gradient. It is orthogonal to ρ = π / π_old.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import keep
from posttrain.types import Batch

Level = Literal["token", "sequence", "geometric"]


def truncated(batch: Batch, *, cap: float = 2.0, low: float = 0.0, level: Level = "token") -> Batch:
    """``c = clip(π_old / π_sampler, low, cap)``: bounded variance for a little bias.

    Truncated from above by Ionides, 2008. ``low`` above 0 also keeps a token from vanishing that
    the sampler found much likelier than the trainer does: it is raised to ``low``, where
    :func:`masked` would drop it. ``level`` takes the ratio of each token, of the whole
    ``sequence`` (the product) or its ``geometric`` mean.
    Shapes: old_logprobs, sampler_logprobs [B, T] → correction [B, T].

    >>> import torch
    >>> batch = Batch.from_rewards([0.0, 0.0]).replace(
    ...     old_logprobs=torch.tensor([[0.9], [0.2]]).log(),
    ...     sampler_logprobs=torch.tensor([[0.3], [0.4]]).log())
    >>> truncated(batch).correction.T
    tensor([[2.0000, 0.5000]])
    """
    checks.number("cap", cap, above=0.0)
    checks.number("low", low, low=0.0, high=min(cap, 1.0))
    return batch.replace(correction=keep(_ratio(batch, level).clamp(low, cap), batch.active))


def masked(batch: Batch, *, low: float = 0.5, high: float = 2.0, level: Level = "token") -> Batch:
    """``c = π_old / π_sampler`` inside [low, high], 0 outside: what cannot be trusted is dropped.

    Token by token this is IcePop (Ling Team, 2025, arXiv:2510.18855), with 0.5 and 5 there.
    Shapes: old_logprobs, sampler_logprobs [B, T] → correction [B, T].

    >>> import torch
    >>> batch = Batch.from_rewards([0.0, 0.0]).replace(
    ...     old_logprobs=torch.tensor([[0.9], [0.3]]).log(),
    ...     sampler_logprobs=torch.tensor([[0.3], [0.4]]).log())
    >>> masked(batch).correction.T
    tensor([[0.0000, 0.7500]])
    """
    checks.number("low", low, low=0.0, high=1.0)
    checks.number("high", high, low=1.0)
    ratio = _ratio(batch, level)
    inside = (ratio >= low) & (ratio <= high)
    return batch.replace(correction=keep(ratio, inside & batch.active))


def _ratio(batch: Batch, level: Level) -> Tensor:
    checks.choice("level", level, known=("token", "sequence", "geometric"))
    old, sampler = batch.need("old_logprobs"), batch.need("sampler_logprobs")
    active = batch.active
    log_ratio = keep((old - sampler).detach(), active)
    if level != "token":
        total = log_ratio.sum(dim=1, keepdim=True)
        if level == "geometric":
            total = total / active.sum(dim=1, keepdim=True).clamp_min(1)
        log_ratio = total.expand_as(log_ratio)
    return log_ratio.clamp(-20.0, 20.0).exp()


CORRECTIONS: dict[str, Callable[..., Batch]] = {"truncated": truncated, "masked": masked}
