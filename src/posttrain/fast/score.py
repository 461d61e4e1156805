"""The door to scoring tokens: log-probs and entropies of a batch, in little time and memory.

Where the model allows it, the batch is packed and a shared prompt is computed once
(:mod:`posttrain.fast.packed_states`), and on a GPU passes are replayed from CUDA graphs
(:mod:`posttrain.fast.captured_pass`). Logits are large: 16 sequences of 1,024 tokens over 150,000
words are 10 GB in float32, and a gradient needs several such; here only a chunk of them exists at
any time. The plain twin is :func:`posttrain.models.logprobs.score_tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.fast.activations import checkpoint_activations
from posttrain.fast.captured_pass import CapturedPasses, captured_passes, pausing, replaying
from posttrain.fast.compiled import compilable, compile_layers
from posttrain.fast.linear_products import quicken_linears
from posttrain.fast.packed_states import shares_prompts, states_before
from posttrain.fast.replicas import Replicas, replicas_for
from posttrain.fast.token_scores import (
    Distribution,
    chunk_elements_for,
    kept_elements_for,
    token_scores,
)
from posttrain.models import head, logprobs
from posttrain.models.head import computing_in
from posttrain.models.logprobs import Against, Entropy
from posttrain.protocols import Outputs
from posttrain.types import Batch
from posttrain.types.batch import chosen_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Against",
    "CapturedPasses",
    "Replicas",
    "checkpoint_activations",
    "chunk_elements_for",
    "kept_elements_for",
    "compilable",
    "compile_layers",
    "computing_in",
    "pausing",
    "quicken_linears",
    "replaying",
    "replicas_for",
    "captured_passes",
    "score_tokens",
    "shares_prompts",
    "states_before",
]
Chunk = Callable[..., tuple[Tensor, ...]]


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
    chunk_elements: int | None = None,
) -> Outputs:
    """As :func:`posttrain.models.logprobs.score_tokens`, in bounded memory.

    A ``value_head`` reads the same hidden states. ``chunk_elements`` bounds tokens × vocabulary of
    the logits held at once (None: what suits the device); it changes memory and speed, not the
    result. A model that does more after its head than scale or soft-cap is scored the plain way,
    and so is one ``against`` a teacher that does.
    """
    logprobs.check_scored(
        batch, temperature=temperature, entropy=entropy, chunk_elements=chunk_elements
    )
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    models = [model] if against is None else [model, against.teacher]
    if not all(head.logits_are_head_of_states(each, batch.tokens) for each in models):
        return logprobs.score_tokens(
            model, batch, entropy=entropy, value_head=value_head, against=against, **options
        )
    states = states_before(model.get_decoder(), batch)
    values = None if value_head is None else head.state_values(states, batch, head=value_head)
    tokens = batch.tokens.flatten()[chosen_indices(batch)]
    elements = chunk_elements or chunk_elements_for(states.device)
    scores: tuple[Tensor, ...]
    if head.is_plain(output := model.get_output_embeddings()) and against is None:
        scores = token_scores(
            states.to(head.compute_type(states)),
            tokens,
            weight=output.weight,
            bias=output.bias,
            distribution=Distribution(finish=head.finish_of(model), **options),
            entropy=entropy,
            chunk_elements=chunk_elements,
        )
    else:  # a head that must be called, or whole logits that are compared
        inputs: tuple[Tensor, ...] = (states, tokens)
        if against is not None:
            with torch.no_grad():
                inputs = (*inputs, states_before(against.teacher.get_decoder(), batch))

        def score(states: Tensor, tokens: Tensor, *theirs: Tensor) -> tuple[Tensor, ...]:
            logits = head.project(model, states)
            found = logprobs.score_logits(logits, tokens, entropy=entropy, **options)
            if against is None:
                return found
            other = head.project(against.teacher, *theirs)
            return *found, against.between(logits, other, temperature=temperature)

        size = len(models) * model.config.get_text_config().vocab_size
        scores = _in_chunks(score, inputs, rows=max(1, elements // size))
    return logprobs.outputs_of(batch, scores, entropy=entropy, values=values)


def _in_chunks(score: Chunk, inputs: tuple[Tensor, ...], *, rows: int) -> tuple[Tensor, ...]:
    """``score`` of ``rows`` rows at a time; for the gradient each chunk is computed again."""
    chunks = list(zip(*(tensor.split(rows) for tensor in inputs), strict=True))
    if torch.is_grad_enabled() and len(chunks) > 1:
        score = functools.partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    pieces = [score(*chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
