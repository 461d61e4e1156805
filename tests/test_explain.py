"""``posttrain explain`` and the page that is printed from the same table."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.algorithms import table
from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.choices import GRADIENTS
from posttrain.algorithms.table import ALGORITHMS
from posttrain.cli import explain
from posttrain.registry import options


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


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its equation and source, its options with their defaults, and who has it."""
    explain.explain([name])
    shown = " ".join(capsys.readouterr().out.split())
    first = (inspect.getdoc(ADVANTAGES[name]) or "").splitlines()[0].replace("``", "")
    assert shown.startswith(f"{name} advantage {first}")
    assert "Shapes: " in shown
    assert not re.search(r">>>|``|:func:", shown)
    for option in options(ADVANTAGES[name]):
        assert f"{option}=" in shown
    users = [row for row, made in ALGORITHMS.items() if made.advantage["name"] == name]
    assert shown.endswith(f"algorithms {', '.join(users) or 'none'}")


def test_what_an_advantage_asks_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    explain.explain(["greedy_baseline"])
    shown = capsys.readouterr().out
    assert re.search(r"completions compared +none", shown)
    assert re.search(r"also takes +greedy_rewards", shown)
    assert re.search(r"algorithms +remax", shown)
    explain.explain(["pass_at_k"])
    shown = capsys.readouterr().out
    assert re.search(r"options +k=4", shown)
    assert re.search(r"completions compared +5 or more", shown)
    assert re.search(r"also takes +nothing", shown)


def test_the_page_has_every_advantage_and_an_example_that_runs() -> None:
    """The example is run by test_docs.py; its number is derived here.

    A = ±1/√2 (but for ε), ρ = exp 0.1 within the clip: −½ ρ A and −½ ρ (−A) cancel.
    """
    page = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name in ADVANTAGES:
        assert re.search(rf"^\| `{name}[(`]", page, re.MULTILINE)
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert names["loss"].item() == pytest.approx(0.0, abs=1e-6)
    assert names["batch"].advantages[0, 1].item() == pytest.approx(0.5**0.5, rel=1e-5)


KINDS: list[table.PieceKind] = ["policy loss", "value loss", "averaging", "correction"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_piece_is_explained_and_on_the_page(
    kind: table.PieceKind, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name, function in table.piece_table(kind).items():
        explain.explain([name])
        shown = " ".join(capsys.readouterr().out.split())
        first = (inspect.getdoc(function) or "").splitlines()[0].replace(":func:", "")
        assert f"{name} {kind} {first.replace('`', '')}" in shown
        for option in options(function):
            assert f"{option}=" in shown
        assert re.search(rf"^\| `{name}[(`]", page, re.MULTILINE)


def test_a_name_of_several_things_explains_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    explain.explain(["clipped"])
    shown = capsys.readouterr().out
    assert "clipped  policy loss" in shown
    assert "clipped  value loss" in shown
    assert re.search(r"algorithms +.*ppo", shown)
    explain.explain(["cispo"])  # the algorithm, then its loss
    shown = capsys.readouterr().out
    assert 0 < shown.index("averaging") < shown.index("cispo  policy loss")
    with pytest.raises(ValueError, match=r"did you mean 'token_mean'\? Known: .*clipped.*grpo"):
        explain.explain(["token_men"])
