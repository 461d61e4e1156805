"""How a token is drawn: temperature → top-k → top-p → renormalise → inverse CDF.

The sampler and the trainer share these functions, so the log-probs of both are of the
distribution that was really sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.types import Sampling

_UNITS = 2.0**52


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """``logits / temperature``; greedy decoding (0) speaks of the model's own distribution.

    >>> scale_logits(torch.tensor([2.0]), 0.5), scale_logits(torch.tensor([2.0]), 0.0)
    (tensor([4.]), tensor([2.]))
    """
    return logits if temperature in (0.0, 1.0) else logits / temperature


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits with −inf for every token that top-k, then top-p, removes. Shapes: [N, V] → [N, V].

    Top-k keeps the ``top_k`` likeliest tokens (0: all). Top-p keeps the smallest set of likeliest
    tokens whose probability among those left reaches ``top_p``: always at least one. Of equal
    logits the lower token id counts as the likelier one, so that the choice is the same everywhere.

    >>> filter_logits(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), top_k=2)
    tensor([[3., 2., -inf, -inf]])
    >>> filter_logits(torch.tensor([[0.5, 0.3, 0.2]]).log(), top_p=0.7).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    size = logits.shape[-1]
    limit = min(top_k, size) if top_k > 0 else size
    if limit == size and top_p >= 1.0:
        return logits
    ranked = logits.topk(limit, dim=-1).values  # sorted, likeliest first
    count = torch.full_like(ranked[..., :1], limit, dtype=torch.long)
    if top_p < 1.0:
        mass = _in_units(ranked)
        before = mass.cumsum(-1) - mass
        least = max(1, round(top_p * _UNITS))  # whole, as a fraction would be compared in float32
        count = (before < least).sum(-1, keepdim=True)
    last = ranked.gather(-1, count - 1)
    above, equal = logits > last, logits == last
    left = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= left))), -torch.inf)


def sample(logits: Tensor, uniforms: Tensor, *, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row from given uniform numbers, and say how likely it was.

    The token is the first whose cumulative probability exceeds ``uniforms`` in [0, 1). Temperature
    0 takes the likeliest token and reports the model's own log-prob. NaN logits give a NaN
    log-prob: nothing is checked here, so that the device need not wait.
    Shapes: logits [N, V], uniforms [N] → tokens [N], logprobs [N].

    >>> tokens, logprobs = sample(
    ...     torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.6]), sampling=Sampling()
    ... )
    >>> tokens, logprobs.exp()
    (tensor([1]), tensor([0.3000]))
    """
    scaled = scale_logits(at_least_float32(logits), sampling.temperature)
    if sampling.temperature == 0.0:
        tokens = scaled.argmax(-1)
    else:
        scaled = filter_logits(scaled, top_k=sampling.top_k, top_p=sampling.top_p)
        tokens = _inverse_cdf(_in_units(scaled), uniforms)
    logprobs = scaled.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, logprobs


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision widened: a bfloat16 logit of 20 is only known to ±0.06.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values if values.dtype == torch.float64 else values.float()


def _in_units(logits: Tensor) -> Tensor:
    """Probabilities as whole numbers of 2⁻⁵²: they add up to the same in any order, so that a
    cumulative sum has no rounding, and no device has to give up determinism for it.
    """
    return (logits.softmax(-1, dtype=torch.float64) * _UNITS).round().long()


def _inverse_cdf(mass: Tensor, uniforms: Tensor) -> Tensor:
    """First token whose cumulative mass exceeds the uniform share of it all. [N, V], [N] → [N].

    A token without mass is never the first to exceed anything.
    """
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1]
    target = (uniforms.double() * total).long().clamp_max(total - 1)
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    return tokens.clamp_max(mass.shape[-1] - 1)  # NaN has no order: stay inside the vocabulary
