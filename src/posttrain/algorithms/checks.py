"""Errors for bad input: each names the argument and the fix. No silent NaN leaves this package."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def same_shape(name: str, tensor: Tensor, *, like: Tensor) -> None:
    """Raise unless ``tensor`` has the shape of ``like``."""
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name}: expected shape {list(like.shape)}, got {list(tensor.shape)}; "
            "every [B, T] tensor is indexed by the token it is about"
        )


def finite(name: str, tensor: Tensor, *, where: Tensor | None = None) -> None:
    """Raise if ``tensor`` holds NaN or infinity at an entry that counts."""
    bad = ~torch.isfinite(tensor)
    if where is not None:
        bad = bad & where
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {tensor[tuple(position)].item()} at {position} ({int(bad.sum())} in all); "
            "mark what could not be scored in `valid` instead of passing NaN or infinity on"
        )


def number(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
) -> None:
    """Raise unless ``low <= value <= high`` and ``value > above``."""
    if not (low <= value <= high and value > above and math.isfinite(value)):
        bounds = [
            f"> {above:g}" if above > -math.inf else "",
            f">= {low:g}" if low > -math.inf else "",
            f"<= {high:g}" if high < math.inf else "",
        ]
        wanted = " and ".join(bound for bound in bounds if bound) or "finite"
        raise ValueError(f"{name}: must be {wanted}, got {value}")


def choice(name: str, value: str, *, known: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{name}: unknown {value!r}; choose one of {', '.join(known)}")


def groups_of(least: int, groups: Tensor) -> None:
    """Raise if a group has fewer members than an estimator compares; say which needs no group."""
    numbers, counts = groups.unique(return_counts=True)
    if bool((counts < least).any()):
        # Imported here: the module of the table imports this one.
        from posttrain.algorithms.advantages import without_siblings

        small = counts < least
        have, others = int(counts[small][0]), ", ".join(without_siblings())
        members = "one member" if have == 1 else f"{have} members"
        raise ValueError(
            f"groups: group {numbers[small][0].item()} has {members}, and {least} at least are "
            f"compared; sample {least} or more completions for each prompt (rl.group_size in a "
            f"recipe), or choose an advantage that compares with no other completion: {others}"
        )
