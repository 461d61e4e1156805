"""Demonstrations that are partly wrong: how many, how wrong, and always the same."""

from collections import Counter

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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_held_out_ones_are_of_test_prompts_with_the_same_share_wrong(spec):
    task = make_task(spec)
    rows = demonstrations(task, num=8, wrong_share=0.25, seed=3, split="test")
    by_text = {prompt.text: prompt for prompt in task.prompts("test")}
    scorer = RewardScorer(task.rewards)
    scores = [scorer.score_text(by_text[row["prompt"]], row["completion"]) for row in rows]
    assert sum(score.value < 1 for score in scores) == 2
    learned = {prompt.text for prompt in task.prompts("train")}
    assert not learned & {row["prompt"] for row in rows}
    with pytest.raises(
        ValueError, match=r"test prompts; ask for 1 to .* raise the task's num_test"
    ):
        demonstrations(task, num=51, split="test")


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


def own_answers(*, prompts=("a?", "b?", "c?")):
    """A task whose demonstrations are not its gold answers."""
    return PromptTask(
        name="own",
        rewards={"exact": 1.0},
        train=tuple(
            Prompt(id=text, text=text, columns={"answer": text.upper()}) for text in prompts
        ),
        test=(),
        solve=lambda prompt: prompt.columns["answer"],
        demonstrate=lambda prompt, generator: f"{prompt.text}{generator.randrange(1000)}",
    )


def test_a_tasks_own_demonstrations_show_every_prompt_as_often_as_another():
    rows = demonstrations(own_answers(), num=8, seed=1)
    counts = Counter(row["prompt"] for row in rows)
    assert sorted(counts.values()) == [2, 3, 3]
    assert all(row["completion"].startswith(row["prompt"]) for row in rows)
    assert len({row["completion"] for row in rows}) == 8  # the same prompt, other answers
    assert rows == demonstrations(own_answers(), num=8, seed=1)
    assert rows != demonstrations(own_answers(), num=8, seed=2)
    assert len(demonstrations(own_answers())) == 3


def test_faults_of_a_tasks_own_demonstrations():
    with pytest.raises(ValueError, match="task 'own' shows answers of its own"):
        demonstrations(own_answers(), wrong_share=0.5)
    with pytest.raises(ValueError, match="0 demonstrations asked"):
        demonstrations(own_answers(), num=0)
    with pytest.raises(ValueError, match="5 demonstrations asked, but task 'own' has 0 train"):
        demonstrations(own_answers(prompts=()), num=5)
