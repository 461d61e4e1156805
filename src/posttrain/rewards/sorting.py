"""The reward for sorting numbers, from partial credit to all or nothing.

After the lecture's sorting task (Stanford CS336, 2025, lecture 17), whose rewards of lists the
walk-through has for tensors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer

_LIST = re.compile(r"-?[0-9]{1,18}(?:(?:\s*,\s*|\s+)-?[0-9]{1,18})*")
_BRACKETS = ("[]", "()")


@declare(checks_answer=True)
def sorted_numbers(
    completion: str,
    numbers: Sequence[int],
    *,
    credit: Literal["exact", "positions", "inclusion"] = "exact",
    extract: Extract = "whole",
) -> float:
    """How close the listed numbers y come to ``s = sorted(numbers)``, n of them; 0 to 1.

    ==============  ===================================================================
    ``exact``       ``[y = s]``
    ``positions``   ``Σ_i [y_i = s_i] / max(n, len(y))``
    ``inclusion``   ``(Σ_i [x_i ∈ y] + Σ_{i<n} [y_i ≤ y_{i+1}]) / (2n − 1)``; a list that is too
                    long is cut to n, and its score multiplied by ``n / len(y)``
    ==============  ===================================================================

    The last two are those of the lecture, divided by their maximum. Numbers stand apart by spaces
    or commas, with or without brackets around them; any other text scores 0.

    >>> sorted_numbers("1 2 3", [3, 1, 2]), sorted_numbers("1, 3, 2", [3, 1, 2])
    (1.0, 0.0)
    >>> round(sorted_numbers("1 3 2", [3, 1, 2], credit="positions"), 3)  # the 1 is in place
    0.333
    >>> sorted_numbers("1 3 2", [3, 1, 2], credit="inclusion")  # 3 numbers + 1 pair of 5
    0.8
    """
    expected = sorted(numbers)
    if not expected:
        raise ValueError("numbers: nothing to sort; give the column at least one number")
    text = extract_answer(completion, extract)
    response = None if text is None else parse_numbers(text)
    if response is None:
        return 0.0
    if credit == "exact":
        return float(response == expected)
    if credit == "positions":
        num_right = sum(x == y for x, y in zip(expected, response, strict=False))
        return num_right / max(len(expected), len(response))
    cut = response[: len(expected)]
    points = sum(number in cut for number in expected)
    points += sum(x <= y for x, y in itertools.pairwise(cut))
    return points / (2 * len(expected) - 1) * min(1.0, len(expected) / len(response))


def parse_numbers(text: str) -> list[int] | None:
    """The whole numbers a text lists; None where it holds anything else.

    >>> parse_numbers("[3, -1, 2]"), parse_numbers("3 then 1")
    ([3, -1, 2], None)
    """
    text = text.strip()
    if len(text) >= 2 and text[0] + text[-1] in _BRACKETS:
        text = text[1:-1].strip()
    if not _LIST.fullmatch(text):
        return None
    return [int(number) for number in text.replace(",", " ").split()]
