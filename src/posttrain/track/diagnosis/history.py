"""What rules read: the metrics of the steps so far, and what is known about the run beforehand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 5
"""Steps that a rule looks at as one, so that a single noisy step is neither ill nor healed."""

History = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the numbers alone do not say.

    ``decides`` names the reward that decides what is right, ``weights`` holds every reward's
    weight. The critic learns alone for ``critic_warmup`` steps. ``rounding`` is how far engine and
    trainer may disagree without anything being wrong.
    """

    decides: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    critic_warmup: int = 0
    rounding: float = 0.05


def series(history: History, name: str) -> list[float]:
    """Every finite value of a metric, oldest first.

    >>> series([{"a": 1.0}, {"b": 9.0}, {"a": math.nan}, {"a": 2.0}], "a")
    [1.0, 2.0]
    """
    return [record[name] for record in history if math.isfinite(record.get(name, math.nan))]


def mostly(
    history: History, name: str, *, test: Callable[[float], bool], steps: int = WINDOW
) -> float | None:
    """The median of the last steps if four in five of them pass the test, else None.

    >>> mostly([{"a": 1.0}] * 4 + [{"a": 0.0}], "a", test=lambda value: value > 0.5)
    1.0
    >>> mostly([{"a": 1.0}] * 3 + [{"a": 0.0}] * 2, "a", test=lambda value: value > 0.5)
    """
    values = series(history, name)[-steps:]
    if len(values) < steps or sum(map(test, values)) < 0.8 * steps:
        return None
    return statistics.median(values)


def blocks(values: Sequence[float]) -> list[list[float]]:
    """The values in blocks of ``WINDOW``, the last one whole; an odd rest at the start is left out.

    >>> blocks([9.0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    [[1, 1, 1, 1, 1], [2, 2, 2, 2, 2]]
    """
    rest = len(values) % WINDOW
    return [list(values[at : at + WINDOW]) for at in range(rest, len(values), WINDOW)]


def noise(values: Sequence[float]) -> float:
    """How far the means of two blocks lie apart by chance, to be judged by the spread inside them.

    >>> noise([0.5] * 20), round(noise([0.0, 1.0] * 10), 2)
    (0.0, 0.31)
    """
    inside = [statistics.pvariance(block) for block in blocks(values)]
    return math.sqrt(2 * statistics.fmean(inside) / WINDOW) if inside else math.inf


def level(history: History, setup: Setup) -> float:
    """The reward that decides, or the whole reward where none does, over the last steps."""
    part = series(history, f"reward/part/{setup.decides}")
    values = (part or series(history, "reward/mean"))[-WINDOW:]
    return statistics.fmean(values) if values else 0.0


def solved(history: History, setup: Setup) -> bool:
    """Whether nearly everything is right: what would be an illness is then success."""
    values = series(history, f"reward/part/{setup.decides}")[-WINDOW:]
    return bool(values) and statistics.fmean(values) >= 0.8
