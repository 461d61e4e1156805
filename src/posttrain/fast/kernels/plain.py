"""Row statistics of logits and their gradient in PyTorch, in as few passes as it allows.

Logits are overwritten: a chunk of them is the largest thing in memory, and a second one would be
twice as much. A logit of −inf stands for a token that cannot be drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Stands for −inf: its exp is 0 in any type, and 0 times it is 0, where 0 times −inf is NaN.
_IMPOSSIBLE = -1e4


class Statistics(NamedTuple):
    """Of every row: ``log p(token)``, ``log Σ exp``, and the entropy (0 where not asked); [N]."""

    logprobs: Tensor
    log_sums: Tensor
    entropies: Tensor


def statistics(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    keep: bool = False,
) -> Statistics:
    """What scoring wants of ``softmax(logits / temperature)``. Shapes: [N, V], [N] → [N] each.

    ``H = log Σe^z − Σ p·z``, with z shifted by its largest: nothing overflows, little cancels.
    With ``keep`` the logits are afterwards what they were, but for rounding.

    >>> found = statistics(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    >>> [round(float(part), 4) for part in found]
    [-0.6931, 0.6931, 0.6931]
    """
    if temperature != 1.0:
        logits.div_(temperature)
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest)
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
    weights = logits.exp() if entropy or keep else logits.exp_()
    sums = weights.sum(-1)
    log_sums = sums.log()
    entropies = torch.zeros_like(sums)
    if entropy:
        # Not as a dot product: PyTorch sums pairwise, which is far more exact.
        entropies = log_sums - weights.mul_(logits.clamp_min_(_IMPOSSIBLE)).sum(-1) / sums
    if keep:
        logits.add_(largest)
        if temperature != 1.0:
            logits.mul_(temperature)
    return Statistics(chosen - log_sums, largest.squeeze(-1) + log_sums, entropies)


def gradient(
    logits: Tensor,
    tokens: Tensor,
    *,
    log_sums: Tensor,
    of_logprobs: Tensor,
    entropies: Tensor | None = None,
    of_entropies: Tensor | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The gradient of a loss at each logit, given its gradient at log-probs and entropies.

    ``dz = g·(onehot − p) − h·p·(log p + H)``, over the temperature; and with a soft cap (the logits
    are ``cap·tanh(x / cap)``) times ``1 − (logits / cap)²``, which makes it the gradient at x.
    Shapes: logits [N, V], the others [N] → [N, V] in ``dtype``, or in that of the logits.

    >>> gradient(
    ...     torch.tensor([[0.0, 0.0]]),
    ...     torch.tensor([1]),
    ...     log_sums=torch.tensor([0.6931]),
    ...     of_logprobs=torch.tensor([1.0]),
    ... )
    tensor([[-0.5000,  0.5000]])
    """
    of_cap = None if cap is None else 1 - (logits / cap).square_()
    if temperature != 1.0:
        logits.div_(temperature)
    direct = (of_logprobs / temperature)[:, None]
    logits.sub_(log_sums[:, None])
    if entropies is None or of_entropies is None:
        result = logits.exp_().mul_(-direct)
    else:
        indirect = (of_entropies / temperature)[:, None]
        result = logits.exp()
        result.mul_(
            logits.clamp_min_(_IMPOSSIBLE)
            .mul_(-indirect)
            .sub_(direct + indirect * entropies[:, None])
        )
    index = tokens[:, None]
    result.scatter_(-1, index, result.gather(-1, index) + direct)
    if of_cap is not None:  # where the logit is −inf there is no derivative, and no gradient
        result.mul_(of_cap.nan_to_num_(neginf=0.0))
    return result if dtype is None else result.to(dtype)
