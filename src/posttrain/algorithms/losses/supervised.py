"""Losses from data: next-token likelihood, and preferences between whole completions.

Preference losses return one term per pair or ranked set, [N]; the caller averages over N.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms import checks
from posttrain.algorithms.ops import keep
from posttrain.types import Batch, Terms


def nll(logprobs: Tensor, batch: Batch) -> Terms:
    """Negative log-likelihood of the demonstrated tokens: ``ℓ = −log π``. Shapes: [B, T] → [B, T].

    >>> nll(torch.tensor([[0.5]]).log(), Batch.from_rewards([0.0])).loss
    tensor([[0.6931]])
    """
    checks.same_shape("logprobs", logprobs, like=batch.tokens)
    return Terms(loss=-keep(logprobs, batch.active))


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> Tensor:
    """``−log σ(r_chosen − r_rejected − m)``: the preferred completion should score higher by m.

    Bradley and Terry, 1952; margins after Llama 2 (arXiv:2307.09288). Shapes: [N], [N] → [N], with
    one margin for all or [N].

    >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))  # a coin toss: log 2
    tensor([0.6931])
    """
    checks.same_shape("rejected", rejected, like=chosen)
    return -logsigmoid(chosen - rejected - _margin(margin, chosen))


def plackett_luce(
    scores: Tensor, present: Tensor | None = None, *, margin: Tensor | float = 0.0
) -> Tensor:
    """``−Σ_k log [exp(s_k − m) / (exp(s_k − m) + Σ_{j > k} exp s_j)]`` for sets ranked best first.

    Two members are :func:`bradley_terry`. ``present`` marks the members of sets shorter than K,
    which must come first. Shapes: scores, present [N, K] → [N], with one margin for all or [N].

    >>> plackett_luce(torch.zeros(1, 3))  # log 3 + log 2: six orders, all as likely
    tensor([1.7918])
    """
    if scores.ndim != 2:
        raise ValueError(f"scores: expected shape [N, K], got {list(scores.shape)}")
    present = torch.ones_like(scores, dtype=torch.bool) if present is None else present
    checks.same_shape("present", present, like=scores)
    if bool((present[:, 1:] & ~present[:, :-1]).any()):
        raise ValueError("present: the members of a set must come before its padding")
    ranked = scores.masked_fill(~present, -torch.inf)
    later = ranked.flip(1).logcumsumexp(dim=1).flip(1)[:, 1:]  # log Σ_{j > k} exp s_j
    contested = present[:, 1:]  # rank k has a term only if there is a member of rank k + 1
    leader = keep(scores[:, :-1], contested) - _margin(margin, scores[:, 0]).unsqueeze(-1)
    return keep(-logsigmoid(leader - keep(later, contested)), contested).sum(dim=1)


def _margin(margin: Tensor | float, like: Tensor) -> Tensor:
    """The margin of each set: another shape would be spread over the wrong dimension."""
    margin = torch.as_tensor(margin, dtype=like.dtype)
    if margin.ndim > 0:
        checks.same_shape("margin", margin, like=like)
    return margin
