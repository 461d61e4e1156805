"""``posttrain explain`` and the page that is printed from the same table."""

from __future__ import annotations

from pathlib import Path

from posttrain.cli import explain


def test_the_page_of_algorithms_is_up_to_date() -> None:
    """docs/algorithms.md is what ``python -m posttrain.cli.explain`` prints today."""
    page = Path(__file__).parents[1] / "docs" / "algorithms.md"
    assert page.read_text(encoding="utf-8") == explain.page()
