"""Numbers for JSON, which knows no NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(content: Any) -> Any:
    """The same with None in the place of NaN and infinity.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return content
