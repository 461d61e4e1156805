"""A price for saying it at length."""

from __future__ import annotations

from posttrain.rewards.declared import declare


@declare(maximum=0.0)
def length_penalty(
    num_tokens: int, *, target: int, per_token: float = 0.001, maximum: float = 1.0
) -> float:
    """``−min(maximum, per_token · max(0, num_tokens − target))``: 0 up to the target, then falling.

    Give it a positive weight; the value is what is taken off.

    >>> [length_penalty(num_tokens, target=100) for num_tokens in (90, 300, 9999)]
    [0.0, -0.2, -1.0]
    """
    if target < 0 or per_token < 0 or maximum < 0:
        raise ValueError(
            f"target, per_token and maximum must be at least 0, got {target}, {per_token}, "
            f"{maximum}; the penalty is subtracted already"
        )
    return -min(maximum, per_token * max(0, num_tokens - target)) or 0.0  # never −0.0
