"""A price for saying the same again."""

from __future__ import annotations

from typing import Literal

from posttrain.rewards.declared import declare


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
