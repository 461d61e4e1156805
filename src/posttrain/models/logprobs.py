"""Log-probs and entropies of a batch under a model, in memory that does not grow with the batch.

Logits are large: 16 sequences of 1,024 tokens over 150,000 words are 10 GB in float32, and a
gradient needs several such. Here only a chunk of them exists at any time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.algorithms import ops
from posttrain.models import head
from posttrain.models.sampling import at_least_float32, filter_logits, scale_logits
from posttrain.models.states import states_before
from posttrain.models.token_scores import Distribution, Entropy, chunk_elements_for, token_scores
from posttrain.protocols import Outputs
from posttrain.types import Batch
from posttrain.types.prompts import chosen_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def score_tokens(
    model: PreTrainedModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: Entropy = "value",
    value_head: nn.Linear | None = None,
    chunk_elements: int | None = None,
) -> Outputs:
    """``log π(token | what stands before it)`` of every token the policy chose, and the entropy.

    π is the distribution that these sampling options draw from, renormalised; temperature 0
    (greedy) means the model's own. A token that top-k or top-p would no longer keep (the policy
    has moved since it was drawn) is kept all the same: its log-prob stays finite. Entries where
    ``batch.mask`` is False are 0. With gradient where gradients are enabled; the entropy has one
    only if asked (``entropy="gradient"``). A ``value_head`` reads the same hidden states.
    ``chunk_elements`` bounds tokens × vocabulary of the logits held at once (None: what suits the
    device); it changes memory and speed, not the result.
    Shapes: tokens [B, T] → logprobs [B, T], entropy [B, T]; float32, or float64 for such a model.
    """
    _check(batch, temperature=temperature, chunk_elements=chunk_elements, entropy=entropy)
    by_parts = head.logits_are_head_of_states(model, batch.tokens)
    if by_parts:
        states = states_before(model.get_decoder(), batch)
        project: Callable[[Tensor], Tensor] = functools.partial(head.project, model)
    else:
        states = ops.shift(head.full_logits(model, batch.tokens))[batch.mask]
        project = at_least_float32
    values = None
    if value_head is not None:
        seen = states if by_parts else states_before(model.get_decoder(), batch)
        values = head.state_values(seen, batch, head=value_head)
    places, shape = chosen_indices(batch), batch.tokens.shape
    tokens = batch.tokens.flatten()[places]
    elements = chunk_elements or chunk_elements_for(states.device)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    scores: Sequence[Tensor]
    if by_parts and head.is_plain(output := model.get_output_embeddings()):
        scores = token_scores(
            states.to(head.compute_type(states)),
            tokens,
            weight=output.weight,
            bias=output.bias,
            distribution=Distribution(finish=head.finish_of(model), **options),
            entropy=entropy,
            chunk_elements=elements,
        )
    else:  # a head that must be called, or logits that are there already
        score = functools.partial(_score_chunk, project=project, entropy=entropy, **options)
        size = model.config.get_text_config().vocab_size
        scores = _in_chunks(score, (states, tokens), rows=max(1, elements // size))
    zeros = scores[0].new_zeros(batch.tokens.numel())
    logprobs, uncertainty = (zeros.index_copy(0, places, found).view(shape) for found in scores)
    return Outputs(
        logprobs=logprobs, entropy=None if entropy == "none" else uncertainty, values=values
    )


def _in_chunks(score: Chunk, inputs: tuple[Tensor, Tensor], *, rows: int) -> list[Tensor]:
    """``score`` of ``rows`` rows at a time; for the gradient each chunk is computed again."""
    chunks = list(zip(*(tensor.split(rows) for tensor in inputs), strict=True))
    if torch.is_grad_enabled() and len(chunks) > 1:
        score = functools.partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    pieces = [score(*chunk) for chunk in chunks]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def _score_chunk(
    states: Tensor,
    tokens: Tensor,
    *,
    project: Callable[[Tensor], Tensor],
    temperature: float,
    top_k: int,
    top_p: float,
    entropy: Entropy,
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] of tokens [N], and the entropies [N], after hidden states [N, D]."""
    logits = scale_logits(project(states), temperature)
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


def _check(
    batch: Batch, *, temperature: float, chunk_elements: int | None, entropy: Entropy
) -> None:
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
