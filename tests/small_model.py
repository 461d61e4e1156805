"""A model of two narrow layers in float64, and what a naive forward pass says about a batch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from posttrain.models.load import load_policy
from posttrain.types import Batch

OPTIONS = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64}


# Built here, not at the first call: inside float64_throughout other numbers would be drawn.
_BUILT = load_policy("tiny", seed=4, options=OPTIONS, dtype="float64").model


def small_model(*, sharpness: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A fresh copy; ``sharpness`` scales its logits: a large one makes it sure of itself."""
    model = copy.deepcopy(_BUILT)
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    return model.to(dtype)


def naive_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Row by row, without padding: logits of each token given those before it, 0 at the first."""
    rows = []
    for tokens, real in zip(batch.tokens, batch.attention, strict=True):
        logits = model(input_ids=tokens[real][None]).logits[0, :-1]
        rows.append(nn.functional.pad(logits, (0, 0, 1, len(tokens) - int(real.sum()))))
    return torch.stack(rows)


def naive_logprobs(model: nn.Module, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """``log π(token)`` of every token the policy chose, else 0."""
    everything = (naive_logits(model, batch) / temperature).log_softmax(-1)
    chosen = everything.gather(-1, batch.tokens[..., None])[..., 0]
    return chosen * batch.mask


def parameters(model: nn.Module) -> Tensor:
    """All weights in one row, copied."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).clone()
