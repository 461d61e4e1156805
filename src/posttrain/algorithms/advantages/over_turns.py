"""Advantages that give each turn of the policy its own credit, the same one to all of its tokens.

A turn is what the policy writes before an environment replies; what it earned is the sum of the
rewards of its tokens. The other advantages compare whole episodes, as StarPO does (RAGEN; Wang et
al., 2025, arXiv:2504.20073): there a good turn of a bad episode is blamed with the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import (
    Deviation,
    group_centre,
    group_deviation,
    group_index,
    keep,
    window_sum,
)
from posttrain.algorithms.pieces import piece
from posttrain.algorithms.turns import turn_index, turn_sum
from posttrain.types import Batch


@piece(needs={"token_rewards"})
def turn_return_to_go(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """``A_k = Σ_{l ≥ k} γ^(l − k) r_l`` over the policy's turns: what turn k can still change.

    ``r_l`` is the reward of turn l, and every token of turn k gets A_k. γ discounts turns, not
    tokens, so a long turn costs no more than a short one. Of one turn it is the return itself.
    Shapes: token_rewards, turns [B, T] → [B, T].

    >>> batch = Batch.from_tensors(torch.tensor([[1, 1, 0, 1]]),
    ...                            turns=torch.tensor([[0, 0, -1, 1]]),
    ...                            token_rewards=torch.tensor([[0.0, 1.0, 0.0, 2.0]]))
    >>> turn_return_to_go(batch, gamma=0.5).advantages
    tensor([[2., 2., 0., 2.]])
    """
    return _per_token(batch, _returns(batch, gamma))


@piece(needs={"token_rewards"}, smallest_group=2, centred="turn")
def turn_group_normalised(
    batch: Batch, *, gamma: float = 1.0, deviation: Deviation = "sample", epsilon: float = 1e-6
) -> Batch:
    """``A_{i,k} = (R_{i,k} − mean) / (std + ε)`` over the group's episodes that have a turn k.

    ``R_{i,k} = Σ_{l ≥ k} γ^(l − k) r_{i,l}`` is the return-to-go over turns: each turn is compared
    with the same turn of the other episodes, for what came after it began. So what was earned
    before a turn is no credit of it. Turn-level credit in groups as in MT-GRPO (Zeng et al., 2025,
    arXiv:2505.11821), which normalises the rewards of a turn and of the end apart and adds them up.
    With one turn it is :func:`group_normalised`. A turn that one episode alone has is compared with
    nothing, and gets 0; so do equal returns. Shapes: token_rewards, turns [B, T], groups [B] →
    [B, T].

    >>> turns = torch.tensor([[0, -1, 1], [0, -1, 1], [0, -1, -1]])
    >>> rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    >>> batch = Batch.from_tensors(turns >= 0, turns=turns, token_rewards=rewards,
    ...                            groups=torch.zeros(3, dtype=torch.long))
    >>> turn_group_normalised(batch, epsilon=0.0).advantages  # of 1, 2, 0 and of 0, 2
    tensor([[ 0.0000,  0.0000, -0.7071],
            [ 1.0000,  0.0000,  0.7071],
            [-1.0000,  0.0000,  0.0000]])
    """
    checks.number("epsilon", epsilon, low=0.0)
    checks.groups_of(2, batch.need("groups"))
    returns = _returns(batch, gamma)
    has = turn_sum(batch.active.long(), batch) > 0
    has[:, 0] = True if batch.valid is None else batch.valid  # an empty answer is one too
    index, _ = group_index(batch.need("groups"))
    count = returns.shape[1]
    places = (index[:, None] * count + torch.arange(count, device=index.device)).flatten()
    flat, has = returns.flatten(), has.flatten()
    centred = group_centre(flat, places, valid=has)
    spread = group_deviation(flat, places, valid=has, deviation=deviation)
    signal = spread > 0
    scaled = keep(centred, signal) / torch.where(signal, spread + epsilon, 1.0)
    return _per_token(batch, scaled.view_as(returns))


def _returns(batch: Batch, gamma: float) -> Tensor:
    """[B, K]: the discounted sum of what this and the later turns have earned."""
    checks.number("gamma", gamma, low=0.0, high=1.0)
    rewards = batch.need("token_rewards")
    checks.finite("token_rewards", rewards, where=batch.active)
    return window_sum(turn_sum(keep(rewards, batch.active), batch), gamma)


def _per_token(batch: Batch, advantages: Tensor) -> Batch:
    """Give every active token its turn's advantage. Shapes: [B, K] → [B, T]."""
    spread = advantages.gather(1, turn_index(batch)).to(batch.dtype)
    return batch.replace(advantages=keep(spread, batch.active))
