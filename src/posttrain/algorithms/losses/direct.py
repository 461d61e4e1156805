"""Preference losses on the policy itself, without a reward model: DPO and its kin.

Each takes log-probabilities of whole completions, log π(y | x) = Σ_t log π(y_t | x, y_<t), and
returns one term for each pair, or in KTO for each completion; the caller averages them. What a
loss takes beside them it declares: ``ref_logprobs``, those of the reference; ``lengths``, the
numbers of tokens; ``baseline``, the divergence that KTO compares with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms import checks
from posttrain.algorithms.pieces import piece


@piece(needs={"ref_logprobs"})
def dpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``−(1 − ε) log σ(β h) − ε log σ(−β h)``, where h is the margin over the reference.

    ``h = (log π_c − log ref_c) − (log π_r − log ref_r)``, of log-probabilities of whole completions
    (Rafailov et al., 2023, arXiv:2305.18290). ``label_smoothing`` is ε, the share of pairs that are
    taken to be the wrong way round (cDPO; Mitchell, 2023): the loss is then least at a finite
    margin, ``β h = log((1 − ε) / ε)``. Shapes: [N] × 4 → [N].

    >>> zero = torch.zeros(1)
    >>> dpo(zero + 1, zero - 1, ref_chosen=zero, ref_rejected=zero, beta=0.5)  # −log σ(1)
    tensor([0.3133])
    """
    checks.number("beta", beta, above=0.0)
    checks.number("label_smoothing", label_smoothing, low=0.0, high=0.5)
    _same_shape(chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    right, wrong = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong


@piece(needs={"ref_logprobs", "lengths"})
def ipo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_length: Tensor | float = 1.0,
    rejected_length: Tensor | float = 1.0,
    beta: float = 0.1,
) -> Tensor:
    """``(h − 1 / (2β))²``: bring the margin over the reference to 1 / (2β), and no further.

    ``h = (log π_c − log ref_c) / |c| − (log π_r − log ref_r) / |r|``, by the token, as in the
    experiments of the authors; lengths of 1 are the equation of the paper. DPO's loss falls for
    ever as the margin grows, so on pairs that never contradict each other it forgets the reference
    (IPO, Azar et al., 2023, arXiv:2310.12036; β is their τ). Shapes: [N] × 6 → [N].

    >>> zero = torch.zeros(1)
    >>> ipo(zero + 1, zero - 1, ref_chosen=zero, ref_rejected=zero, beta=0.5)  # (2 − 1)²
    tensor([1.])
    """
    checks.number("beta", beta, above=0.0)
    _same_shape(chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    better = (chosen - ref_chosen.detach()) / chosen_length
    worse = (rejected - ref_rejected.detach()) / rejected_length
    return (better - worse - 1 / (2 * beta)).square()


@piece(needs={"ref_logprobs", "baseline"})
def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    desirable: Tensor,
    divergence: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``λ_D (1 − σ(β (h − z)))`` of a desirable completion, ``λ_U (1 − σ(β (z − h)))`` of others.

    ``h = log π − log ref`` of the completion, and z the ``divergence`` of policy and reference:
    ``max(0, mean of log π(y′ | x) − log ref(y′ | x))`` over completions y′ of other prompts. No
    pairs are needed (KTO, Ethayarajh et al., 2024, arXiv:2402.01306, eq. 8).
    Shapes: [N] × 3 → [N].

    >>> h, labels = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    >>> kto(h, torch.zeros(2), desirable=labels, divergence=0.5, beta=2.0)  # 1 − σ(±1)
    tensor([0.2689, 0.7311])
    """
    checks.number("beta", beta, above=0.0)
    for name, weight in {
        "desirable_weight": desirable_weight,
        "undesirable_weight": undesirable_weight,
    }.items():
        checks.number(name, weight, low=0.0)
    _same_shape(logprobs, ref_logprobs=ref_logprobs, desirable=desirable)
    gain = beta * (logprobs - ref_logprobs.detach() - divergence)
    # 1 − σ(x) = σ(−x), which keeps its digits where x is large.
    return torch.where(
        desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
    )


@piece(needs={"lengths"})
def orpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    chosen_length: Tensor | float = 1.0,
    rejected_length: Tensor | float = 1.0,
    beta: float = 0.1,
) -> Tensor:
    """``−log p_c − β log σ(log odds(p_c) − log odds(p_r))``: likelihood, and an odds ratio.

    ``log p = log π / length``, ``odds(p) = p / (1 − p)``. The first term is that of supervised
    training, so neither a reference nor a stage before is needed (ORPO, Hong et al., 2024,
    arXiv:2403.07691; β is their λ). Shapes: [N] × 4 → [N].

    >>> half = torch.tensor([0.5]).log()
    >>> orpo(half, half, beta=1.0)  # log 2 + log 2
    tensor([1.3863])
    """
    checks.number("beta", beta, above=0.0)
    _same_shape(chosen, rejected=rejected)
    better, worse = chosen / chosen_length, rejected / rejected_length
    return -better - beta * logsigmoid(_log_odds(better) - _log_odds(worse))


@piece(needs={"lengths"})
def simpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    chosen_length: Tensor | float = 1.0,
    rejected_length: Tensor | float = 1.0,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """``−log σ(β (log π_c / |c| − log π_r / |r|) − γ)``: a token's mean log-prob is the reward.

    The chosen completion should win by the margin γ; there is no reference, so nothing but the
    learning rate holds the policy (SimPO, Meng et al., 2024, arXiv:2405.14734).
    Shapes: [N] × 4 → [N].

    >>> zero = torch.zeros(1)
    >>> simpo(zero - 2, zero - 6, chosen_length=2.0, rejected_length=4.0, gamma=0.0)  # −log σ(1)
    tensor([0.3133])
    """
    checks.number("beta", beta, above=0.0)
    checks.number("gamma", gamma, low=0.0)
    _same_shape(chosen, rejected=rejected)
    return -logsigmoid(beta * (chosen / chosen_length - rejected / rejected_length) - gamma)


def _log_odds(logprobs: Tensor) -> Tensor:
    """``log p − log(1 − p)``, finite where p is 1 by rounding."""
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))


def _same_shape(like: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        checks.same_shape(name, tensor, like=like)
