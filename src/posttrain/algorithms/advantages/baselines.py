"""Advantages that subtract a number known before the sequence was sampled: A = R − b.

Any b that does not depend on the action leaves the expected gradient as it is, because the score
function has mean zero; a good b makes it less noisy (Williams, 1992).
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import group_centre, group_max, group_sum, keep
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
