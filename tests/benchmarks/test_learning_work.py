"""The counting behind the share of the peak that learning reaches, against numbers by hand."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_operations_of_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    learning = runpy.run_path(str(FOLDER / "learning.py"))
    shape = learning["Shape"](
        weights=1000, layers=2, heads=4, key_heads=2, head_size=8, vocabulary=5, width=32
    )
    work = learning["Work"](prompts=2, group=3, asked=4, length=3)
    found = learning["operations"](shape, work)
    # Tokens that layers read: 2 · (4 + 3 · 2); of the 1000 weights 5 · 32 are the head's.
    assert found["layers"] == 6 * 840 * 20
    assert found["head"] == 6 * 160 * 18
    # A prompt's tokens see 1 + 2 + 3 + 4, a completion's 5 + 6; 12 · 2 layers · 4 heads · 8.
    assert found["attention"] == 768 * 2 * (10 + 3 * 11)
