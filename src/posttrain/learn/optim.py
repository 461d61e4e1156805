"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

Schedule = Literal["constant", "linear", "cosine"]
Moments = Literal["full", "8bit"]
BLOCK, SMALLEST = 256, 4096  # of bitsandbytes: weights that share a scale, fewest that are rounded


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    moments: Moments = "full",
) -> torch.optim.Optimizer:
    """AdamW; weight decay touches matrices only, never norms, biases or other vectors.

    ``betas`` are how much of the running means of the gradient and of its square each step keeps.
    Both ``moments`` are kept in the weights' own type, or in 8 bits in blocks with a scale each
    (Dettmers et al. 2021, arXiv:2110.02861), by bitsandbytes.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if moments == "8bit":
        check_moments(moments)
        from bitsandbytes.optim import AdamW8bit

        rounded: torch.optim.Optimizer = AdamW8bit(groups, lr=learning_rate, betas=betas, eps=1e-8)
        return rounded
    # Fused: one kernel for all weights, on a CPU three times as fast for the tiny model.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trainable)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=fused)


def check_moments(moments: Moments) -> None:
    """Raise where 8-bit moments are asked for and the package that keeps them is not there."""
    if moments == "8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            'adam_moments: "8bit" needs the package bitsandbytes: pip install '
            "'posttrain[bitsandbytes]'"
        )


def moment_bytes(weights: Iterable[Tensor], moments: Moments = "full") -> int:
    """Bytes of AdamW's two moments of these weights; meta tensors will do.

    In 8 bits, a byte each and a float32 scale for every 256; small tensors stay in float32.

    >>> [moment_bytes([torch.zeros(4096)], kind) for kind in ("full", "8bit")]
    [32768, 8320]
    """
    if moments == "full":
        return sum(2 * weight.numel() * weight.element_size() for weight in weights)
    sizes = [weight.numel() for weight in weights]
    return sum(2 * (n + 4 * -(-n // BLOCK)) if n >= SMALLEST else 8 * n for n in sizes)


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
