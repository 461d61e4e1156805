"""Which cases of a test `make test` runs; `make slow-test` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[str], *quick: str) -> list[Any]:
    """All cases, marked slow but for those that are named."""
    names = list(cases)
    assert set(quick) <= set(names), "a case that there is not"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
