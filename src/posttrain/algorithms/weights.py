"""Averaging is data: how much each token's term counts, decided once per optimiser step.

A loss returns terms per token; the update is ``Σ weights · loss``. Weights are made from the whole
mini-batch, before it is cut into micro-batches, so no cut, packing or world size changes the
gradient. To add one, write the function and name it in :data:`WEIGHTS`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import keep
from posttrain.types import Batch


def token_mean(batch: Batch) -> Batch:
    """Every token counts the same: ``w = 1 / Σ_i |o_i|`` (DAPO, PPO). Shapes: mask [B, T] → [B, T].

    >>> import torch
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> token_mean(Batch(tokens=mask.long(), mask=mask)).weights
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.0000, 0.0000]])
    """
    active = batch.active
    return batch.replace(weights=active.to(batch.dtype) / active.sum().clamp_min(1))


def sequence_mean(batch: Batch) -> Batch:
    """Every sequence counts the same: ``w = 1 / (N · |o_i|)`` (GRPO). Shapes: [B, T] → [B, T].

    N counts the sequences that have at least one active token.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> sequence_mean(Batch(tokens=mask.long(), mask=mask)).weights
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    active = batch.active.to(batch.dtype)
    lengths = active.sum(dim=1, keepdim=True)
    return batch.replace(weights=active / lengths.clamp_min(1) / _num_sequences(lengths))


def sequence_sum(batch: Batch, *, length: int = 1) -> Batch:
    """Tokens add up, over a constant: ``w = 1 / (N · length)``. Shapes: [B, T] → [B, T].

    With ``length=1`` this is REINFORCE's ``1/N Σ_i Σ_t``; with ``length`` set to the generation
    limit it is Dr. GRPO's, which gives long wrong answers no discount (arXiv:2503.20783).

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> sequence_sum(Batch(tokens=mask.long(), mask=mask), length=2).weights
    tensor([[0.2500, 0.2500],
            [0.2500, 0.0000]])
    """
    checks.number("length", length, low=1)
    active = batch.active.to(batch.dtype)
    return batch.replace(weights=active / (_num_sequences(active.sum(dim=1)) * length))


def total(terms: Tensor, batch: Batch) -> Tensor:
    """The number to differentiate: ``Σ weights · terms``. Shapes: [B, T] → [].

    >>> import torch
    >>> batch = token_mean(Batch.from_rewards([1.0, 2.0]))
    >>> total(torch.tensor([[3.0], [5.0]]), batch)
    tensor(4., dtype=torch.float64)
    """
    checks.same_shape("terms", terms, like=batch.tokens)
    return (batch.need("weights") * keep(terms, batch.active)).sum()


def _num_sequences(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum().clamp_min(1)


WEIGHTS: dict[str, Callable[..., Batch]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
