"""Start and end of a curve, as means over the same steps in every report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Ends(NamedTuple):
    """Where a curve begins and where it ends: means over its first and its last ``num`` values."""

    first: float
    last: float
    num: int


def ends(values: Sequence[float]) -> Ends | None:
    """The ends of a curve over a tenth of its values, ten at most; None where there are none.

    >>> ends([0.0, 0.5, 1.0])
    Ends(first=0.0, last=1.0, num=1)
    >>> ends([float(value) for value in range(20)])
    Ends(first=0.5, last=18.5, num=2)
    """
    if not values:
        return None
    num = min(10, max(1, len(values) // 10))
    return Ends(sum(values[:num]) / num, sum(values[-num:]) / num, num)


def over_steps(num: int) -> str:
    """Over what the two ends of a curve are means.

    >>> over_steps(1), over_steps(3)
    ('first and last step', 'first and last 3 steps')
    """
    return "first and last step" if num == 1 else f"first and last {num} steps"
