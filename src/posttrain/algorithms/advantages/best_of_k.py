"""The advantage that maximises the best of k completions instead of the average one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.advantages.baselines import per_token, sequence_returns
from posttrain.algorithms.ops import group_count, group_max
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


@piece(smallest_group=lambda k: k + 1, centred="group")
def pass_at_k(batch: Batch, *, k: int = 4) -> Batch:
    """What a completion adds to the best of k: the policy gradient of pass@k, without bias.

    ``A_i = k · (mean of max(R_I) over sets I of k that hold i − the same over sets without i)``,
    over all sets of k completions of the group (PKPO; Walder & Karkhanis, 2025, arXiv:2505.15201:
    n times its leave-one-out estimate, so that ``1/N Σ_i A_i ∇log π`` is the gradient). Rewards may
    be any numbers; of 0 and 1, the maximum is whether one of the k is right. With k = 1 it is
    :func:`leave_one_out`. The advantages of a group add up to 0. A group needs more than k members;
    one in which no more than k could be scored gets 0. Shapes: rewards, groups [B] → [B, T].

    >>> batch = Batch.from_rewards([1.0, 0.0, 0.0])
    >>> pass_at_k(batch, k=2).advantages.T  # 2 · (1 − 0), and 2 · (½ − 1) twice
    tensor([[ 2., -1., -1.]], dtype=torch.float64)
    """
    checks.number("k", k, low=1)
    groups, returns = batch.need("groups"), sequence_returns(batch)
    checks.groups_of(k + 1, groups)
    valid = torch.ones_like(groups, dtype=torch.bool) if batch.valid is None else batch.valid
    values = returns - group_max(returns, groups, valid=valid)  # equal rewards: exactly 0
    count = group_count(groups, valid)
    advantages = torch.zeros_like(values)
    for size in count[valid & (count > k)].unique().tolist():
        rows = (valid & (count == size)).nonzero()[:, 0]
        rows = rows[values[rows].argsort()]
        rows = rows[groups[rows].argsort(stable=True)].view(-1, size)  # ascending in each group
        advantages[rows] = values[rows] @ _of_sorted(size, k).to(values).T
    return per_token(batch, advantages)


def _of_sorted(size: int, k: int) -> Tensor:
    """[G, G]: the advantages of a group as a matrix on its rewards in ascending order.

    The j-th of them (from 0) is the maximum of a set when the k − 1 others come from the j below
    it; when one of those is i, from the j − 1 that are left. Integers make the ratios exact.
    """

    def sets(highest: int, own: int) -> int:
        """Sets of k that hold ``own`` and have ``highest`` at the top."""
        if own > highest:
            return 0
        if own == highest:
            return math.comb(highest, k - 1)
        return math.comb(highest - 1, k - 2) if k > 1 else 0

    def weight(own: int, highest: int) -> float:
        holding = sets(highest, own)
        without = math.comb(highest, k - 1) - holding
        return k * (holding / math.comb(size - 1, k - 1) - without / math.comb(size - 1, k))

    rows = [[weight(own, highest) for highest in range(size)] for own in range(size)]
    return torch.tensor(rows, dtype=torch.float64)
