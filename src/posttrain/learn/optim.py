"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

Schedule = Literal["constant", "linear", "cosine"]


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.Optimizer:
    """AdamW; weight decay touches matrices only, never norms, biases or other vectors.

    ``betas`` are how much of the running means of the gradient and of its square each step keeps.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused: one kernel for all weights, on a CPU three times as fast for the tiny model.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trainable)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=fused)


def rate_factor(step: int, *, total: int, warmup: int, schedule: Schedule) -> float:
    """What the learning rate is multiplied by before optimiser step ``step`` (0 is the first).

    Linear warm-up over ``warmup`` steps, then constant, or a decay to 0 at step ``total``.

    >>> [rate_factor(s, total=4, warmup=2, schedule="linear") for s in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
