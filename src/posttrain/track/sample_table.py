"""Rollouts of a step as a table, for trackers that can show one."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.track.printable import printable
from posttrain.types import Rollout

Row = Mapping[str, Any]
Rows = Callable[[], Sequence[Row]]
MAX_TEXT = 1000  # characters of a prompt or a completion


def log_samples(tracker: object, step: int, *, rows: Rows) -> None:
    """Hand rollouts to a tracker, where it has a method ``log_samples(step, rows)``."""
    takes = getattr(tracker, "log_samples", None)
    if takes is not None:
        takes(step, rows)


def sample_rows(
    rollouts: Sequence[Rollout], advantages: Sequence[float | None], *, most: int = 32
) -> list[Row]:
    """The first rollouts of a step, each with what it earned."""
    rows: list[Row] = []
    for rollout, advantage in list(zip(rollouts, advantages, strict=True))[:most]:
        score = rollout.score
        row = {"prompt": rollout.prompt.shown[:MAX_TEXT], "completion": rollout.text[:MAX_TEXT]}
        known = {} if score is None else {"reward": score.value, **score.parts}
        rows.append({**row, **known, "advantage": advantage, "stop": rollout.stop_reason})
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of all rows, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown, in which every text of a rollout is only text.

    >>> print(markdown([{"prompt": "1|1", "reward": 0.5}, {"prompt": "<b>"}]))
    | prompt | reward |
    |---|---|
    | 1&#124;1 | 0.5 |
    | &lt;b&gt; |  |
    """
    names = columns_of(rows)
    lines: list[list[Any]] = [[*names], *([row.get(name) for name in names] for row in rows)]
    head, *rest = ("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(names), *rest])


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    escaped = html.escape(printable(text))
    for character in "|`*_[]\\":
        escaped = escaped.replace(character, f"&#{ord(character)};")
    return escaped
