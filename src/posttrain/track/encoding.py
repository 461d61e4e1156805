"""Valid JSON for every number: what JSON has no number for is written as a string.

NaN and the infinities become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float(…)`` in
Python and ``Number(…)`` in JavaScript read back. ``null`` would lose which of them it was.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any


def encode_json(value: Any, *, indent: int | None = None) -> bytes:
    """``value`` as UTF-8 JSON; what JSON does not know (a path, a date) is written as its text.

    >>> encode_json({"loss": float("nan"), "reward": [0.5, float("-inf")]})
    b'{"loss": "NaN", "reward": [0.5, "-Infinity"]}'
    """
    text = json.dumps(
        _plain(value), indent=indent, default=str, allow_nan=False, ensure_ascii=False
    )
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate is written as \udXXX


def encode_number(value: float) -> float | str:
    """A number as itself, or as the string that stands for it.

    >>> encode_number(float("inf")), encode_number(2.5)
    ('Infinity', 2.5)
    """
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)


def _plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return value if isinstance(value, int) else int(value)
    if isinstance(value, numbers.Real):
        return encode_number(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
