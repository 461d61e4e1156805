"""Value losses: ``(values, batch, *, options) -> Terms``, one term per token.

``values`` [B, T] are the critic's, with gradient; ``batch.returns`` are the targets (from
:func:`posttrain.algorithms.advantages.gae`), ``batch.values`` are the critic's when the batch was
made. All carry the factor ½, so ``c_V (V − R)²`` with c_V = 0.5 is a coefficient of 1 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.diagnostics import value_terms
from posttrain.algorithms.ops import keep
from posttrain.types import Batch, Terms


def squared(values: Tensor, batch: Batch) -> Terms:
    """``ℓ = ½ (V − R)²``. Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(returns=torch.ones(1, 1))
    >>> squared(torch.tensor([[3.0]]), batch).loss
    tensor([[2.]])
    """
    values, returns = _known(values, batch)
    return _terms((values - returns).square() / 2, values, batch=batch)


def clipped_value(values: Tensor, batch: Batch, *, clip: float = 0.2) -> Terms:
    """``ℓ = ½ max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)``: V may not run from V_old.

    Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(
    ...     returns=torch.ones(1, 1), values=torch.zeros(1, 1))
    >>> clipped_value(torch.tensor([[1.0]]), batch).loss  # held at 0.2: ½ (0.2 − 1)²
    tensor([[0.3200]])
    """
    checks.number("clip", clip, above=0.0)
    values, returns = _known(values, batch)
    old = keep(batch.need("values").detach(), batch.active)
    free = (values - returns).square()
    held = (old + (values - old).clamp(-clip, clip) - returns).square()
    return _terms(torch.maximum(free, held) / 2, values, batch=batch, clipped=held > free)


def huber(values: Tensor, batch: Batch, *, delta: float = 1.0) -> Terms:
    """``ℓ = ½ e²`` while ``|e| = |V − R| ≤ δ``, then ``δ (|e| − ½ δ)``: outliers pull linearly.

    Shapes: [B, T] → [B, T].

    >>> batch = Batch.from_rewards([1.0]).replace(returns=torch.ones(1, 1))
    >>> huber(torch.tensor([[4.0]]), batch).loss
    tensor([[2.5000]])
    """
    checks.number("delta", delta, above=0.0)
    values, returns = _known(values, batch)
    distance = (values - returns).abs()
    loss = torch.where(distance <= delta, distance.square() / 2, delta * (distance - delta / 2))
    return _terms(loss, values, batch=batch)


def _known(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Values and their targets, zero at inactive tokens: 0 · NaN would give a NaN gradient."""
    checks.same_shape("values", values, like=batch.tokens)
    return keep(values, batch.active), keep(batch.need("returns").detach(), batch.active)


def _terms(loss: Tensor, values: Tensor, *, batch: Batch, clipped: Tensor | None = None) -> Terms:
    active = batch.active
    clipped = torch.zeros_like(active) if clipped is None else clipped
    returns = batch.need("returns").detach()
    means = value_terms(values, returns, clipped=clipped, active=active)
    return Terms(loss=keep(loss, active), means=means)
