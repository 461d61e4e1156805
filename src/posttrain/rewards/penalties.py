"""Penalties: what is taken off for length and repetition. Give each a positive weight."""

from __future__ import annotations

from typing import Literal

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


@declare(maximum=0.0)
def repetition_penalty(
    completion: str,
    *,
    n: int = 4,
    maximum: float = 1.0,
    by: Literal["words", "characters"] = "words",
) -> float:
    """``−maximum · (1 − distinct / total)`` over the n-grams: 0 where no n-gram comes twice.

    A text shorter than one n-gram costs nothing. Give it a positive weight; the value is what is
    taken off.

    >>> repetition_penalty("a b c d e f"), repetition_penalty("so so so so so so", n=2)
    (0.0, -0.8)
    """
    if n < 1 or maximum < 0:
        raise ValueError(
            f"n must be at least 1 and maximum at least 0, got {n} and {maximum}; the penalty is "
            "subtracted already"
        )
    pieces = completion.split() if by == "words" else completion
    total = len(pieces) - n + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(pieces[start : start + n]) for start in range(total)})
    return -maximum * (1 - distinct / total) or 0.0  # never −0.0
