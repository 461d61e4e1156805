"""Advantages that compare the return of a sequence with a baseline: A = R − b.

Any b that does not depend on the action leaves the expected gradient as it is, because the score
function has mean zero; a good b makes it less noisy (Williams, 1992). It is a number known before
the sequence was sampled, or what the other completions of the same prompt return.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import (
    Deviation,
    group_centre,
    group_count,
    group_deviation,
    group_max,
    group_sum,
    keep,
    others_deviation,
)
from posttrain.algorithms.pieces import piece
from posttrain.types import Batch


def sequence_returns(batch: Batch) -> Tensor:
    """The return R of each sequence: the sum of its token rewards, or its reward where it has none.

    Shapes: → [B]. Sequences that are not valid return 0.

    >>> sequence_returns(Batch.from_rewards([1.0, 0.5]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    active = batch.active
    if batch.token_rewards is not None:
        checks.finite("token_rewards", batch.token_rewards, where=active)
        return keep(batch.token_rewards, active).sum(dim=1)
    rewards = batch.need("rewards")
    checks.finite("rewards", rewards, where=batch.valid)
    return rewards if batch.valid is None else keep(rewards, batch.valid)


def per_token(batch: Batch, advantages: Tensor) -> Batch:
    """Give every active token of a sequence that sequence's advantage. Shapes: [B] → [B, T].

    >>> per_token(Batch.from_rewards([1.0]), torch.tensor([0.5])).advantages
    tensor([[0.5000]], dtype=torch.float64)
    """
    spread = advantages.to(batch.dtype)[:, None].expand(batch.tokens.shape)
    return batch.replace(advantages=keep(spread, batch.active))


def plain_return(batch: Batch) -> Batch:
    """The return itself: ``A = R`` (REINFORCE; Williams, 1992). Shapes: rewards [B] → [B, T].

    >>> plain_return(Batch.from_rewards([1.0, 0.0])).advantages.T
    tensor([[1., 0.]], dtype=torch.float64)
    """
    return per_token(batch, sequence_returns(batch))


def constant_baseline(batch: Batch, *, baseline: float) -> Batch:
    """A fixed number: ``A = R − b``. Shapes: rewards [B] → [B, T].

    >>> constant_baseline(Batch.from_rewards([1.0, 0.0]), baseline=0.9).advantages.T
    tensor([[ 0.1000, -0.9000]], dtype=torch.float64)
    """
    checks.number("baseline", baseline)
    return per_token(batch, sequence_returns(batch) - baseline)


@piece(needs={"baseline"})
def moving_baseline(batch: Batch) -> Batch:
    """The running mean of earlier rewards: ``A = R − b``, with b in ``batch.baseline``.

    The loop keeps b by :func:`update_baseline`, after the batch is used: a baseline that already
    knew this batch would depend on its actions. One b for all sequences; :func:`greedy_baseline`
    has one for each. Shapes: rewards [B], baseline [] → [B, T].

    >>> batch = Batch.from_rewards([1.0, 0.0]).replace(baseline=torch.tensor(0.25))
    >>> moving_baseline(batch).advantages.T
    tensor([[ 0.7500, -0.2500]], dtype=torch.float64)
    """
    baseline = batch.need("baseline")
    checks.finite("baseline", baseline)
    return per_token(batch, sequence_returns(batch) - baseline)


def update_baseline(baseline: float | None, batch: Batch, *, decay: float = 0.9) -> float:
    """The running mean after this batch: ``b ← decay · b + (1 − decay) · mean(R)``.

    ``None`` starts it at the batch's mean. A batch without a valid reward leaves it as it is.

    >>> update_baseline(0.0, Batch.from_rewards([1.0, 1.0]), decay=0.75)
    0.25
    """
    checks.number("decay", decay, low=0.0, high=1.0)
    returns = sequence_returns(batch)
    valid = torch.ones_like(returns, dtype=torch.bool) if batch.valid is None else batch.valid
    if not bool(valid.any()):
        return 0.0 if baseline is None else baseline
    mean = float(returns[valid].mean())
    return mean if baseline is None else decay * baseline + (1 - decay) * mean


@piece(needs={"greedy_rewards"})
def greedy_baseline(batch: Batch) -> Batch:
    """What a prompt's greedy completion scores, as its baseline: ``A = R − R(greedy)``.

    ReMax (Li et al., 2023, arXiv:2310.10505). A baseline for each sequence, in
    ``batch.greedy_rewards``; it depends on the prompt and not on what was sampled, so it leaves the
    expected gradient as it is, and one completion of a prompt is enough. It is the score alone:
    penalties of length or KL are in R only. Where it is NaN the greedy completion could not be
    scored, and A is 0. Shapes: rewards, greedy_rewards [B] → [B, T].

    >>> batch = Batch.from_rewards([1.0, 0.0]).replace(greedy_rewards=torch.tensor([0.25, 0.5]))
    >>> greedy_baseline(batch).advantages.T
    tensor([[ 0.7500, -0.5000]], dtype=torch.float64)
    """
    baselines = batch.need("greedy_rewards")
    known = ~torch.isnan(baselines)
    counts = known if batch.valid is None else known & batch.valid
    checks.finite("greedy_rewards", baselines, where=counts)
    return per_token(batch, keep(sequence_returns(batch) - baselines, known))


@piece(needs={"score_norms"}, smallest_group=2)
def optimal_baseline(batch: Batch) -> Batch:
    """The baseline of least variance, estimated within each group.

    ``b*(s) = E[‖∇ log π(a|s)‖² R | s] / E[‖∇ log π(a|s)‖² | s]``, ``A = R − b*`` (Greensmith et
    al., 2004). The squared norms are in ``batch.score_norms``; where they are all zero, nothing
    can be learned and b* is the mean. Shapes: rewards, score_norms [B] → [B, T].

    >>> batch = Batch.from_rewards([1.0, 0.0]).replace(score_norms=torch.tensor([3.0, 1.0]))
    >>> optimal_baseline(batch).advantages.T
    tensor([[ 0.2500, -0.7500]], dtype=torch.float64)
    """
    norms = batch.need("score_norms")
    checks.finite("score_norms", norms, where=batch.valid)
    groups, returns = batch.need("groups"), sequence_returns(batch)
    norms = norms.to(returns.dtype)
    norms = norms if batch.valid is None else keep(norms, batch.valid)
    if bool((norms < 0).any()):
        raise ValueError("score_norms: must be squared norms, so at least 0")
    total = group_sum(norms, groups)
    shifted = returns - group_max(returns, groups, valid=batch.valid)
    baseline = group_sum(norms * shifted, groups) / torch.where(total > 0, total, 1.0)
    mean_centred = group_centre(returns, groups, valid=batch.valid)
    return per_token(batch, torch.where(total > 0, shifted - baseline, mean_centred))


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
