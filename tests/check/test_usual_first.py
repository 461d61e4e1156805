"""A setting that is far from usual is what a check advises to mend, before any other."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe

from posttrain.check import check_recipe

# (what is set in [rl], the lines that do not pass, what they advise)
FAR: list[tuple[dict[str, Any], list[str], str]] = [
    ({"max_gradient_norm": 1e-30}, ["one step"], "set rl.max_gradient_norm to 0.001 or more"),
    ({"temperature": 50.0}, ["groups with signal", "length"], "set rl.temperature from 0.05 to 5"),
]


@pytest.mark.parametrize(("section", "names", "advice"), FAR)
def test_what_is_far_from_usual_is_mended_first(
    section: dict[str, Any], names: list[str], advice: str, tmp_path: Path
) -> None:
    given = recipe(tmp_path / "run", rl=section, sft=None, eval=None)
    given["rewards"] = {"numeric": {"extract": "whole"}}  # the model is never right
    fixes = {line.name: line.fix for line in check_recipe(given, fast=True).of("warn")}
    assert {fixes[name] for name in names} == {f"{advice} first: it is far from usual"}
