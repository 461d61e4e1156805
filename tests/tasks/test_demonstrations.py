"""Demonstrations that are partly wrong: how many, how wrong, and always the same."""

import pytest

from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import PromptTask, demonstrations, make_task
from posttrain.types import Prompt

SPECS = [
    {"name": "sort", "length": 3, "num_train": 300, "num_test": 50},
    {"name": "arithmetic", "digits": 1, "think": True, "num_train": 200, "num_test": 10},
    {"name": "countdown", "num_train": 200, "num_test": 10},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
@pytest.mark.parametrize("wrong_share", [0.0, 0.25, 1.0])
def test_exactly_the_share_is_wrong(spec, wrong_share):
    task = make_task(spec)
    rows = demonstrations(task, num=120, wrong_share=wrong_share, seed=3)
    by_text = {prompt.text: prompt for prompt in task.prompts("train")}
    scorer = RewardScorer(task.rewards)
    golds = {task.gold(prompt) for prompt in task.prompts("train")}
    scores = [scorer.score_text(by_text[row["prompt"]], row["completion"]) for row in rows]
    assert sum(score.value < 1 for score in scores) == 120 * wrong_share
    assert len({row["prompt"] for row in rows}) == 120
    assert {row["completion"] for row in rows} <= golds


def test_the_seed_decides():
    task = make_task(SPECS[0])
    first = demonstrations(task, num=50, wrong_share=0.5, seed=1)
    assert first == demonstrations(task, num=50, wrong_share=0.5, seed=1)
    assert first != demonstrations(task, num=50, wrong_share=0.5, seed=2)
    assert len(demonstrations(task)) == 300


def one_answer(messages=()):
    prompts = tuple(
        Prompt(id=f"{n}", text="" if messages else f"say a ({n})", messages=messages, columns=c)
        for n, c in enumerate([{"answer": "a"}, {"answer": "a"}])
    )
    return PromptTask(
        name="one", rewards={"exact": 1.0}, train=prompts, test=(), solve=lambda prompt: "a"
    )


def test_faults():
    task = make_task(SPECS[0])
    with pytest.raises(ValueError, match="301 demonstrations asked, but task 'sort' has 300 train"):
        demonstrations(task, num=301)
    with pytest.raises(ValueError, match="wrong_share: must be from 0 to 1"):
        demonstrations(task, num=3, wrong_share=1.5)
    with pytest.raises(ValueError, match="none is wrong for prompt"):
        demonstrations(one_answer(), wrong_share=1.0)
    with pytest.raises(ValueError, match="prompts of text"):
        demonstrations(one_answer(({"role": "user", "content": "say a"},)))


def test_rewards_that_cannot_score_are_no_wrong_answers():
    task = one_answer()
    task.rewards = {"numeric": 1.0}  # the answers are no numbers
    with pytest.raises(ValueError, match="cannot score demonstrations: reward 'numeric' raised"):
        demonstrations(task, wrong_share=1.0)
