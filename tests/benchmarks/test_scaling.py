"""The fit and the counting behind the scaling table, against numbers derived by hand."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script puts its folder in front
    for name in ("roofline", "bench_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return runpy.run_path(str(FOLDER / "scaling.py"))


def test_the_exponent_of_a_power_is_found_whatever_its_factor(scaling: dict[str, Any]) -> None:
    sizes = [3, 6, 12, 24]
    assert scaling["exponent"](sizes, [7 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    # log₂ of 1, 4, 4 over 0, 1, 2: the line of least squares rises by (2 − 0) / 2 = 1.
    assert scaling["exponent"]([1, 2, 4], [1, 4, 4]) == pytest.approx(1.0)


def test_the_operations_of_a_step(scaling: dict[str, Any]) -> None:
    shape = scaling["Shape"](
        weights=1000, layers=2, heads=4, key_heads=2, head_size=8, vocabulary=50, width=32
    )
    point = scaling["Point"](prompts=2, group=3, length=10, hidden=32, layers=2)
    # A prompt of 48: 2·1000·48 + 256·48²/2 = 390912; a completion: 2·1000·10 + 256·(48·10 + 50).
    forward = 2 * (390912 + 3 * 155680)
    assert scaling["operations"](shape, point) == {"sampling": forward, "learning": 3 * forward}
