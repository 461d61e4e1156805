"""Advantages that give each token its own credit: return-to-go, GAE, and batch whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.advantages.baselines import per_token, sequence_returns
from posttrain.algorithms.ops import (
    Deviation,
    compact,
    group_centre,
    group_deviation,
    keep,
    whiten,
    window_sum,
)
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(needs={"token_rewards"})
def return_to_go(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """``A_t = Σ_{l ≥ 0} γ^l r_{t+l}`` over the policy's tokens: what this token can still change.

    Tokens that the policy did not choose (a tool's answer between two turns) are stepped over.
    Shapes: token_rewards, mask [B, T] → [B, T].

    >>> batch = Batch.from_tensors(torch.ones(1, 3), token_rewards=torch.ones(1, 3))
    >>> return_to_go(batch, gamma=0.5).advantages
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    checks.number("gamma", gamma, low=0.0, high=1.0)
    return batch.replace(advantages=_returns_to_go(batch, gamma).to(batch.dtype))


@piece(
    needs={"token_rewards", "values"},
    centred=lambda *, normalise, **_: "batch" if normalise else None,
)
def gae(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    steps: int | None = None,
    normalise: bool = True,
    deviation: Deviation = "population",
) -> Batch:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438).

    ``δ_t = r_t + γ V_{t+1} − V_t`` and ``A_t = Σ_{l < K} (γλ)^l δ_{t+l}``, over the policy's tokens
    only; after the last one V is 0. λ = 0 is the temporal difference, λ = 1 the Monte-Carlo
    return minus V. ``steps`` is K (None: to the end). ``returns = A + V`` are the critic's targets;
    ``normalise`` then whitens A over the batch, which leaves the targets as they are; it divides by
    the deviation of all n tokens, or of a sample (``deviation="sample"``: n − 1).
    Shapes: token_rewards, values, mask [B, T] → advantages, returns [B, T].

    >>> batch = Batch.from_tensors(torch.ones(1, 2), token_rewards=torch.tensor([[0.0, 1.0]]),
    ...                            values=torch.tensor([[0.25, 0.5]]))
    >>> gae(batch, lam=0.5, normalise=False).advantages
    tensor([[0.5000, 0.5000]])
    """
    checks.number("gamma", gamma, low=0.0, high=1.0)
    checks.number("lam", lam, low=0.0, high=1.0)
    if steps is not None:
        checks.number("steps", steps, low=1)
    active = batch.active
    rewards, values = batch.need("token_rewards"), batch.need("values").detach()
    checks.finite("token_rewards", rewards, where=active)
    checks.finite("values", values, where=active)
    order = compact(active)
    value = keep(values, active).gather(1, order)
    next_value = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    delta = keep(rewards, active).gather(1, order) + gamma * next_value - value
    ahead = window_sum(delta, gamma * lam, steps=steps)
    advantages = keep(torch.zeros_like(ahead).scatter(1, order, ahead), active)
    returns = keep(advantages + values, active)
    if normalise:
        advantages = whiten(advantages, active, deviation=deviation)
    dtype = batch.dtype
    return batch.replace(advantages=advantages.to(dtype), returns=returns.to(dtype))


@piece(
    needs=lambda *, gamma, **_: {"token_rewards"} if gamma != 1 else (),
    smallest_group=lambda *, centre_groups, **_: 2 if centre_groups else 1,
    centred="batch",
)
def batch_whitened(
    batch: Batch,
    *,
    gamma: float = 1.0,
    centre_groups: bool = False,
    deviation: Deviation = "population",
) -> Batch:
    """Return-to-go, whitened over all tokens of the batch (REINFORCE++; arXiv:2501.03262).

    ``A_t = (R_t − mean) / std`` with mean and deviation over the batch's n active tokens; the
    squares are divided by n (``deviation="population"``) or n − 1 (``"sample"``). Without token
    rewards, R_t is the sequence's reward. ``centre_groups`` subtracts the group's mean first (the
    paper's REINFORCE++-baseline). Shapes: rewards [B] → [B, T].

    >>> batch_whitened(Batch.from_rewards([3.0, 1.0])).advantages.T
    tensor([[ 1., -1.]], dtype=torch.float64)
    """
    checks.number("gamma", gamma, low=0.0, high=1.0)
    if gamma != 1 and (centre_groups or batch.token_rewards is None):
        raise ValueError(
            "gamma: discounts token rewards, and there are none here; set gamma=1, or make them "
            "with shaping.score_at_last_token and leave centre_groups out"
        )
    if centre_groups:
        groups = batch.need("groups")
        checks.groups_of(2, groups)
        returns = sequence_returns(batch)
        centred = group_centre(returns, groups, valid=batch.valid)
        signal = group_deviation(returns, groups, valid=batch.valid) > 0
        returns = per_token(batch, keep(centred, signal)).need("advantages")
    elif batch.token_rewards is None:
        returns = per_token(batch, sequence_returns(batch)).need("advantages")
    else:
        returns = _returns_to_go(batch, gamma)
    whitened = whiten(returns, batch.active, deviation=deviation)
    return batch.replace(advantages=whitened.to(batch.dtype))


def _returns_to_go(batch: Batch, gamma: float) -> Tensor:
    """[B, T]: discounted sum of this and the later token rewards, over the policy's tokens."""
    active, rewards = batch.active, batch.need("token_rewards")
    checks.finite("token_rewards", rewards, where=active)
    order = compact(active)
    ahead = window_sum(keep(rewards, active).gather(1, order), gamma)
    return keep(torch.zeros_like(ahead).scatter(1, order, ahead), active)
