"""DAPO's price for running into the length limit."""

from __future__ import annotations

from posttrain.rewards.declared import declare


@declare(maximum=0.0)
def overlong_penalty(num_tokens: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """``−factor · clip((num_tokens − (limit − buffer)) / buffer, 0, 1)`` (arXiv:2503.14476).

    Free up to ``limit − buffer`` tokens, the full ``factor`` at ``limit``, as
    ``posttrain.algorithms.shaping.overlong``. Give it a positive weight.

    >>> [overlong_penalty(num_tokens, limit=10, buffer=4) for num_tokens in (6, 9, 12)]
    [0.0, -0.75, -1.0]
    """
    if not 1 <= buffer <= limit or factor < 0:
        raise ValueError(
            f"expected 1 <= buffer <= limit and factor >= 0, got buffer {buffer}, limit {limit}, "
            f"factor {factor}; the penalty is subtracted already"
        )
    excess = (num_tokens - (limit - buffer)) / buffer
    return -factor * min(1.0, max(0.0, excess)) or 0.0  # never −0.0
