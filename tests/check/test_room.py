"""What a later stage cannot do is said before the first begins."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run

from posttrain.check import check_recipe

# What is set, and what is said of it: the model of these runs has a context of 64 tokens.
TOO_LONG: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"eval": {"max_new_tokens": 64}}, r"eval\.max_new_tokens: 64 leaves no room for a prompt"),
    ({"eval": {"max_new_tokens": 62}}, r"eval\.max_new_tokens: 62 leaves no room even for the sho"),
    ({"rl": {"max_new_tokens": 100}}, r"rl\.max_new_tokens: 100 leaves no room for a prompt"),
]


@pytest.mark.parametrize(("changes", "message"), TOO_LONG)
def test_completions_that_leave_no_room_end_a_run_before_sft(
    changes: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    given = recipe(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        small_run(given)
    assert not (tmp_path / "run" / "sft").exists()
    assert [line.name for line in check_recipe(given, fast=True).of("fail")] == ["room for answers"]


def describe(item: str) -> str:
    """What there is to know of something in a shop, in as many words as there may be.

    Args:
        item: One of the many things that the shop has.
    """
    return item


class Shop:
    """An environment whose only tool takes more than the context."""

    describe = staticmethod(describe)

    def reset(self) -> None: ...


def test_tools_and_the_tiny_models_context_are_named_where_no_prompt_fits(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", sft=None, eval=None, task={"env": f"{__name__}:Shop"})
    said = r"; about \d+ tokens of each describe the environment's tools; .*max_positions = \d+ \}"
    with pytest.raises(ValueError, match=said):
        small_run(given)


def test_a_setting_far_from_usual_is_a_line_of_check_and_of_a_run(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", rl={"weight_decay": 50, "steps": 1}, eval=None)
    (line,) = check_recipe(given, fast=True).of("warn")[:1]
    assert (line.area, line.name) == ("config", "rl.weight_decay")
    assert line.fix == "set it from 0 to 1, or leave it if intended"
    _, said = small_run(given)
    assert "caution: rl.weight_decay: 50 is far from usual: each step takes" in said


def test_a_warm_up_longer_than_sft_and_more_held_out_than_learned_are_said(tmp_path: Path) -> None:
    given = recipe(
        tmp_path / "run", sft={"warmup_steps": 99}, task={"num_train": 16, "num_test": 20}
    )
    found = {line.name: line.text for line in check_recipe(given, fast=True).of("warn")}
    assert found["sft.warmup_steps"].startswith("99, but sft takes 4 optimiser steps")
    assert found["prompts"] == "16 train, 20 test"
