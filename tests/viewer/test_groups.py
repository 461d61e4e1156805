"""Groups and prompts, found among all rollouts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.runs import Filter, Rollouts, rollout_file, write_rollouts
from posttrain.types import Prompt, Rollout, Score, Turn
from posttrain.viewer.group_pages import group_page, groups_of, prompt_page, prompts_of

# Rewards by step and prompt: "easy" is solved from the start, "late" from step 2 on, "never" never.
REWARDS = {
    1: {"easy": [1.0, 1.0], "late": [0.0, 0.0], "never": [0.0, 0.25]},
    2: {"easy": [1.0, 0.0], "late": [1.0, 1.0], "never": [0.0, None]},
}


@pytest.fixture
def store(tmp_path: Path) -> Rollouts:
    """Two steps of three prompts; None is a grader that broke."""
    for step, prompts in REWARDS.items():
        rollouts = []
        for group, (name, rewards) in enumerate(prompts.items()):
            for sample, reward in enumerate(rewards):
                score = Score(value=0.0, state="crashed") if reward is None else Score(value=reward)
                tokens = tuple(range(1, 2 + sample))
                turn = Turn(tokens=tokens, text=f"{name} {sample}", logprobs=(0.0,) * len(tokens))
                asked = Prompt(id=name, text=f"about {name}")
                rollouts.append(Rollout(prompt=asked, turns=(turn,), group=group, score=score))
        write_rollouts(rollout_file(tmp_path, step), rollouts, step=step)
    return Rollouts(tmp_path)


def found(store: Rollouts, **asked: Any) -> list[tuple[int, str]]:
    where = Filter(**{k: v for k, v in asked.items() if k in Filter.__dataclass_fields__})
    rest = {k: v for k, v in asked.items() if k not in Filter.__dataclass_fields__}
    page = group_page(store, groups_of(store), where=where, **rest)
    return [(group["step"], group["prompt_id"]) for group in page["groups"]]


def test_a_group_is_found_by_any_of_its_members_and_shown_whole(store: Rollouts) -> None:
    page = group_page(store, groups_of(store), where=Filter(min_reward=0.2, max_reward=0.3))
    (group,) = page["groups"]
    assert (group["step"], group["prompt_id"], len(group["members"])) == (1, "never", 2)
    assert (group["reward"], group["spread"]) == (0.125, 0.125)
    assert found(store, state="broken") == [(2, "never")]
    assert found(store, text="LATE 1") == [(1, "late"), (2, "late")]
    assert found(store, prompt_id="easy", first_step=2) == [(2, "easy")]


def test_groups_are_ordered_by_what_they_come_to(store: Rollouts) -> None:
    by_reward = found(store, sort="reward")
    assert by_reward[:2] == [(1, "late"), (2, "never")]  # both 0: the earlier step first
    assert found(store, sort="spread", descending=True)[0] == (2, "easy")
    assert found(store, sort="step", descending=True, limit=1) == [(2, "never")]
    assert found(store, sort="step", offset=4, limit=9) == [(2, "late"), (2, "never")]
    broken = group_page(store, groups_of(store), where=Filter(state="broken"))["groups"][0]
    assert broken["reward"] == 0.0  # over the one whose grader worked


def test_prompts_are_followed_through_training(store: Rollouts) -> None:
    page = prompt_page(store, prompts_of(store), sort="best")
    rows = {row["prompt_id"]: row for row in page["prompts"]}
    assert page["highest"] == 1.0
    assert rows["never"]["best"] == 0.25
    assert rows["never"]["times"] == 3  # a broken one does not count
    assert rows["late"]["change"] == 1.0
    assert rows["easy"]["change"] == -0.5
    assert rows["easy"]["mean"] == 0.75
    assert [
        row["prompt_id"] for row in prompt_page(store, prompts_of(store), unsolved=True)["prompts"]
    ] == ["never"]
    assert prompt_page(store, prompts_of(store), sort="change")["prompts"][0]["prompt_id"] == "easy"


def test_an_empty_store_has_empty_pages(tmp_path: Path) -> None:
    empty = Rollouts(tmp_path)
    assert group_page(empty, groups_of(empty), where=Filter())["groups"] == []
    assert prompt_page(empty, prompts_of(empty))["prompts"] == []
    assert len(groups_of(empty).starts) == 0
    assert groups_of(empty).with_any(np.zeros(0, dtype=int), 0).tolist() == []
