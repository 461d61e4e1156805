"""Advantages that compare a completion with the other completions of the same prompt."""

from __future__ import annotations

from typing import Literal

import torch

from posttrain.algorithms import checks
from posttrain.algorithms.advantages.baselines import per_token, sequence_returns
from posttrain.algorithms.ops import (
    Deviation,
    group_centre,
    group_count,
    group_deviation,
    group_max,
    keep,
    others_deviation,
)
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(smallest_group=2, centred="group")
def group_centred(batch: Batch) -> Batch:
    """``A_i = R_i − mean(R of the group)`` (Dr. GRPO; Liu et al., 2025, arXiv:2503.20783).

    A group of equal rewards has nothing to say: its advantages are exactly 0.
    Shapes: rewards, groups [B] → [B, T].

    >>> group_centred(Batch.from_rewards([3.0, 1.0, 2.0])).advantages.T
    tensor([[ 1., -1.,  0.]], dtype=torch.float64)
    """
    groups = batch.need("groups")
    checks.groups_of(2, groups)
    return per_token(batch, group_centre(sequence_returns(batch), groups, valid=batch.valid))


@piece(smallest_group=2, centred="group")
def group_normalised(
    batch: Batch, *, deviation: Deviation = "sample", epsilon: float = 1e-6
) -> Batch:
    """``A_i = (R_i − mean) / (std + ε)`` over the group (GRPO; arXiv:2402.03300).

    ``deviation`` divides by G − 1 (``"sample"``, as in the lecture's code and most trainers) or by
    G (``"population"``, as in the worked examples). Equal rewards give exactly 0, whatever ε is.
    Shapes: rewards, groups [B] → [B, T].

    >>> batch = Batch.from_rewards([1.0, 1.0, 0.0, 1.0, 0.0])
    >>> group_normalised(batch, deviation="population").advantages.T
    tensor([[ 0.8165,  0.8165, -1.2247,  0.8165, -1.2247]], dtype=torch.float64)
    """
    checks.number("epsilon", epsilon, low=0.0)
    groups, returns = batch.need("groups"), sequence_returns(batch)
    checks.groups_of(2, groups)
    centred = group_centre(returns, groups, valid=batch.valid)
    spread = group_deviation(returns, groups, valid=batch.valid, deviation=deviation)
    signal = spread > 0
    return per_token(batch, keep(centred, signal) / torch.where(signal, spread + epsilon, 1.0))


@piece(smallest_group=2)
def max_only(batch: Batch, *, keeps: Literal["reward", "centred"] = "reward") -> Batch:
    """Only the best of the group count: ``A_i = R_i`` (or ``R_i − mean``) at the maximum, else 0.

    The lecture's code keeps the reward, its formula the centred reward: both are here. Ties all
    count. Shapes: rewards, groups [B] → [B, T].

    >>> batch = Batch.from_rewards([3.0, 1.0, 2.0])
    >>> max_only(batch).advantages.T, max_only(batch, keeps="centred").advantages.T
    (tensor([[3., 0., 0.]], dtype=torch.float64), tensor([[1., 0., 0.]], dtype=torch.float64))
    """
    checks.choice("keeps", keeps, known=("reward", "centred"))
    groups, returns = batch.need("groups"), sequence_returns(batch)
    checks.groups_of(2, groups)
    best = returns == group_max(returns, groups, valid=batch.valid)
    kept = returns if keeps == "reward" else group_centre(returns, groups, valid=batch.valid)
    return per_token(batch, keep(kept, best))


@piece(smallest_group=2, centred="group")
def leave_one_out(batch: Batch) -> Batch:
    """``A_i = R_i − mean(R of the others)`` (RLOO; Ahmadian et al., 2024, arXiv:2402.14740).

    Written as ``n / (n − 1) · (R_i − mean)``, which is the same number. The baseline does not
    hold R_i itself, so the gradient is unbiased. Shapes: rewards, groups [B] → [B, T].

    >>> leave_one_out(Batch.from_rewards([3.0, 1.0, 2.0])).advantages.T
    tensor([[ 1.5000, -1.5000,  0.0000]], dtype=torch.float64)
    """
    groups = batch.need("groups")
    checks.groups_of(2, groups)
    centred = group_centre(sequence_returns(batch), groups, valid=batch.valid)
    count = group_count(groups, batch.valid)
    return per_token(batch, centred * count / (count - 1).clamp_min(1))


@piece(smallest_group=2)
def leave_one_out_normalised(
    batch: Batch, *, deviation: Deviation = "sample", epsilon: float = 1e-6
) -> Batch:
    """``A_i = (R_i − mean of the others) / (std of the others + ε)``: neither holds R_i itself.

    :func:`group_normalised` with a scale that, like the baseline, does not depend on the completion
    it judges: a rare success among failures is not made small by the spread it makes itself. So it
    has no upper limit: what differs from others that hardly differ is far away. Where the others
    are equal (or there is one only) they give no scale, and the deviation of the whole group does.
    ``deviation`` is that of :func:`group_normalised`. Shapes: rewards, groups [B] → [B, T].

    >>> leave_one_out_normalised(Batch.from_rewards([4.0, 1.0, 3.0]), epsilon=0.0).advantages.T
    tensor([[ 1.4142, -3.5355,  0.2357]], dtype=torch.float64)
    """
    checks.number("epsilon", epsilon, low=0.0)
    groups, returns = batch.need("groups"), sequence_returns(batch)
    apart = leave_one_out(batch).need("advantages")
    others = others_deviation(returns, groups, valid=batch.valid, deviation=deviation)
    whole = group_deviation(returns, groups, valid=batch.valid, deviation=deviation)
    spread = torch.where(others > 0, others, whole)[:, None].to(apart.dtype)
    return batch.replace(advantages=keep(apart / (spread + epsilon), spread > 0))
