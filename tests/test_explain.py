"""``posttrain explain`` and the page that is printed from the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.algorithms.kl import GRADIENTS
from posttrain.cli import explain


def test_the_page_of_algorithms_is_up_to_date() -> None:
    """docs/algorithms.md is what ``python -m posttrain.cli.explain`` prints today."""
    page = Path(__file__).parents[1] / "docs" / "algorithms.md"
    assert page.read_text(encoding="utf-8") == explain.page()


def test_the_gradient_of_every_estimator_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    explain.explain(["kl"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for (estimator, direction), (plain, weighted) in GRADIENTS.items():
        assert [estimator, direction, *plain.split(), *weighted.split()] in rows


def test_a_row_with_a_divergence_in_its_loss_says_what_that_pulls_along(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explain.explain(["grpo"])
    text = " ".join(capsys.readouterr().out.split())
    assert "The gradient of its KL is on average ∇ KL(π_ref ‖ π): posttrain explain kl" in text
    explain.explain(["rloo"])  # in the reward it has no gradient of its own
    assert "The gradient of its KL" not in capsys.readouterr().out
