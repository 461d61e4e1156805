"""A teacher for a policy: another model that speaks of the same tokens, in as many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from posttrain.models.load import Policy

# Of a token that only the policy has a row for: e^−100 is 0 in float32, and its log-prob is finite.
NEVER = -100.0


def check_teacher(teacher: Policy, policy: Policy) -> None:
    """Raise where teacher and policy mean different things by a token, or by the end of a text."""
    theirs, ours = teacher.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    wrong = [word for word in {**ours, **theirs} if theirs.get(word) != ours.get(word)]
    told = f"teacher.model: {teacher.source!r}"
    if wrong:
        there, here = (known.get(wrong[0], "missing") for known in (theirs, ours))
        raise ValueError(
            f"{told} has another vocabulary than the policy ({len(theirs)} tokens and {len(ours)}; "
            f"{len(wrong)} differ: {wrong[0]!r} is {there} there and {here} here), so it would "
            "score other words than were sampled; take a teacher of the policy's own family"
        )
    if not set(teacher.end_tokens) & set(policy.end_tokens):
        ends = [
            model.tokenizer.convert_ids_to_tokens(list(model.end_tokens))
            for model in (teacher, policy)
        ]
        raise ValueError(
            f"{told} ends its texts with {ends[0]} and the policy with {ends[1]}, so it would "
            "teach never to end; take one that shares an end token (base or instruct, both alike)"
        )


@torch.no_grad()
def fit_rows(model: Any, rows: int) -> None:
    """Give a model so many rows of embedding and head, in place.

    Sizes of one family share a tokenizer and pad these rows to different multiples. Rows beyond
    ``rows`` belong to no token, and are cut off: probabilities add up to 1 over the others. Rows
    that are missing are read as 0, and never emitted.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    known = head.weight.shape[0]
    if known == rows:
        return

    def resized(weight: torch.Tensor) -> nn.Parameter:
        kept = weight[:rows]
        padding = kept.new_zeros(rows - len(kept), *kept.shape[1:])
        return nn.Parameter(torch.cat([kept, padding]), requires_grad=False)

    bias = head.bias
    if rows > known or bias is not None:
        old = head.weight.new_zeros(known) if bias is None else bias
        head.bias = resized(old)
        head.bias[known:] = NEVER
    embedding.weight, head.weight = resized(embedding.weight), resized(head.weight)
    embedding.num_embeddings = head.out_features = rows
    model.config.get_text_config().vocab_size = rows
    if hasattr(model, "vocab_size"):
        model.vocab_size = rows
