"""Seeds within a run: each draw has its own, and no two runs share one."""

from __future__ import annotations

APART = 1_000_003  # a prime above the number of draws of a run


def draw_seed(seed: int, number: int) -> int:
    """The seed of draw ``number`` of a run: those of runs with other seeds are far from it.

    Were they next to each other, draw 1 of the run with seed 0 would be draw 0 of that with seed 1.

    >>> draw_seed(0, 1), draw_seed(1, 0)
    (1, 1000003)
    """
    return seed * APART + number
