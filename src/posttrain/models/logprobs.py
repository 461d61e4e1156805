"""Log-probs and entropies of a batch under a model: whole logits, one log-softmax.

The plain way, for any model. :mod:`posttrain.fast.score` gives the same numbers in less time, and
in memory that does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.algorithms import ops
from posttrain.models.head import full_logits, state_values, states_before
from posttrain.models.sampling import at_least_float32, filter_logits, scale_logits
from posttrain.protocols import Outputs
from posttrain.types import Batch
from posttrain.types.batch import chosen_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Entropy = Literal["none", "value", "gradient"]


class Against(NamedTuple):
    """A teacher without gradient, and the divergence that is asked for: [N, V] × 2 → [N]."""

    teacher: PreTrainedModel
    divergence: Callable[[Tensor, Tensor], Tensor]

    def between(self, logits: Tensor, theirs: Tensor, *, temperature: float) -> Tensor:
        """The divergence of both distributions, at the temperature that is sampled with."""
        return self.divergence(scale_logits(logits, temperature), scale_logits(theirs, temperature))


def score_tokens(
    model: PreTrainedModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: Entropy = "value",
    value_head: nn.Linear | None = None,
    against: Against | None = None,
) -> Outputs:
    """``log π(token | what stands before it)`` of every token the policy chose, and the entropy.

    π is the distribution that these sampling options draw from, renormalised; temperature 0
    (greedy) means the model's own. A token that top-k or top-p would no longer keep (the policy
    has moved since it was drawn) is kept all the same: its log-prob stays finite. Entries where
    ``batch.mask`` is False are 0. With gradient where gradients are enabled; the entropy has one
    only if asked (``entropy="gradient"``). A ``value_head`` reads the hidden states. ``against`` a
    teacher, the divergence of the whole distributions is there too.
    Shapes: tokens [B, T] → logprobs [B, T], entropy [B, T]; float32, or float64 for such a model.
    """
    check_scored(batch, temperature=temperature, entropy=entropy)
    logits = at_least_float32(ops.shift(full_logits(model, batch.tokens))[batch.mask])
    scores: tuple[Tensor, ...] = score_logits(
        logits,
        batch.tokens[batch.mask],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        entropy=entropy,
    )
    if against is not None:
        with torch.no_grad():
            theirs = at_least_float32(
                ops.shift(full_logits(against.teacher, batch.tokens))[batch.mask]
            )
        scores = (*scores, against.between(logits, theirs, temperature=temperature))
    values = None
    if value_head is not None:
        values = state_values(states_before(model.get_decoder(), batch), batch, head=value_head)
    return outputs_of(batch, scores, entropy=entropy, values=values)


def score_logits(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    entropy: Entropy,
) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens, and entropies, under their logits: [N, V], [N] → [N], [N]."""
    logits = scale_logits(logits, temperature)
    index = tokens[:, None]
    kept = filter_logits(logits, top_k=top_k, top_p=top_p)
    if kept is not logits:
        kept = kept.scatter(-1, index, logits.gather(-1, index))
    everything = kept.log_softmax(-1)
    logprobs = everything.gather(-1, index).squeeze(-1)
    if entropy == "none":
        return logprobs, torch.zeros_like(logprobs)
    if entropy == "value":  # −p·log p in one pass, and 0 for p = 0; its gradient there is not
        return logprobs, torch.special.entr(everything.detach().exp()).sum(-1)
    possible = everything.masked_fill(torch.isneginf(everything), 0.0)
    return logprobs, -(everything.exp() * possible).sum(-1)


def outputs_of(
    batch: Batch, scores: tuple[Tensor, ...], *, entropy: Entropy, values: Tensor | None
) -> Outputs:
    """Log-probs, entropies and perhaps divergences of the chosen tokens: [M] each → [B, T] each."""
    indices, shape = chosen_indices(batch), batch.tokens.shape
    zeros = scores[0].new_zeros(batch.tokens.numel())
    found = [zeros.index_copy(0, indices, each.to(zeros.dtype)).view(shape) for each in scores]
    return Outputs(
        logprobs=found[0],
        entropy=None if entropy == "none" else found[1],
        divergence=found[2] if len(found) > 2 else None,
        values=values,
    )


def check_scored(
    batch: Batch, *, temperature: float, entropy: Entropy, chunk_elements: int | None = None
) -> None:
    """Raise for options and batches that have no log-probs."""
    too_few = chunk_elements is not None and chunk_elements < 1
    if temperature < 0 or too_few or entropy not in ("none", "value", "gradient"):
        raise ValueError(
            "score_tokens: temperature must be at least 0, chunk_elements at least 1, entropy one "
            f"of none, value, gradient; got {temperature}, {chunk_elements}, {entropy!r}"
        )
    if bool(batch.host.mask[:, 0].any()):
        raise ValueError(
            "mask: a sequence begins with a token that the policy chose, but nothing stands before "
            "it to choose it by; give every prompt at least one token"
        )
