"""What every task keeps: gold scores full marks, little else does, the splits share nothing."""

import importlib.util
import json
import os

import pytest

from posttrain.protocols import Task
from posttrain.registry import options
from posttrain.registry import split as split_spec
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import TASKS, make_task
from posttrain.tasks.task import identity

SMALL = {"num_train": 60, "num_test": 15}
SPECS = {
    "sort": {"name": "sort", **SMALL},
    "sort short": {"name": "sort", "length": 3, "maximum": 5, "num_train": 60, "num_test": 10},
    "arithmetic": {"name": "arithmetic", **SMALL},
    "arithmetic think": {"name": "arithmetic", "think": True, "num_operands": 4, **SMALL},
    "countdown": {"name": "countdown", **SMALL},
    "countdown think": {"name": "countdown", "think": True, "num_numbers": 4, **SMALL},
    "melody": {"name": "melody", **SMALL},
    "guess_number": {"name": "guess_number", **SMALL},
    "tic_tac_toe": {"name": "tic_tac_toe", **SMALL},
    "gsm8k": {"name": "gsm8k", "path": "{folder}"},
    "gsm8k itself": {"name": "gsm8k", "path": os.environ.get("POSTTRAIN_GSM8K", "")},
    "jsonl": {"name": "jsonl", "path": "{folder}/rows.jsonl", "test_share": 0.25},
    "file": {"name": "file", "path": "{folder}/train.jsonl", "test_share": 0.25},
    "mixture": {
        "name": "mixture",
        "tasks": [{"name": "sort", **SMALL}, {"name": "arithmetic", **SMALL}],
    },
    "jsonl chat": {"name": "jsonl", "path": "{folder}/chat.jsonl", "test_share": 0.25},
    "reasoning_gym": {"name": "reasoning_gym:chain_sum", **SMALL},
    "reasoning_gym sudoku": {"name": "reasoning_gym:mini_sudoku", **SMALL},
}


def write(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small files in the formats of GSM8K and of the user's own data."""
    folder = tmp_path_factory.mktemp("data")
    problems = [
        {
            "question": f"Ann has {n} nuts and finds {n + 3}. How many has she?",
            "answer": f"{n}+{n + 3}=<<{n}+{n + 3}={2 * n + 3}>>{2 * n + 3}\n#### {2 * n + 3:,}",
        }
        for n in range(480, 540)
    ]
    write(folder / "train.jsonl", problems[:45])
    write(folder / "test.jsonl", problems[45:])
    rows = [{"prompt": f"What follows {n}?", "answer": str(n + 1)} for n in range(60)]
    write(folder / "rows.jsonl", rows)
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in rows
    ]
    write(folder / "chat.jsonl", chats)
    return folder


def spec_of(name, folder):
    if name == "gsm8k itself" and not SPECS[name]["path"]:
        pytest.skip("POSTTRAIN_GSM8K does not name GSM8K's folder")
    if name.startswith("reasoning_gym") and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    return {
        key: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
        for key, value in SPECS[name].items()
    }


@pytest.fixture(scope="module", params=SPECS)
def spec(request, folder):
    return spec_of(request.param, folder)


@pytest.fixture(scope="module")
def task(spec) -> Task:
    return make_task(spec)


@pytest.fixture(scope="module")
def scorer(task):
    return RewardScorer(task.rewards)


def everything(task):
    return [*task.prompts("train"), *task.prompts("test")]


def test_every_task_is_here():
    assert {spec["name"].partition(":")[0] for spec in SPECS.values()} == set(TASKS)


def test_gold_scores_full_marks(task, scorer):
    for prompt in everything(task):
        scorer.check_columns(prompt)
        score = scorer.score_text(prompt, task.gold(prompt))
        assert score.ok, score.reason
        assert score.value == pytest.approx(1, rel=1e-12)
        # Full marks in every part, so that "right" can be read off any of them.
        assert set(score.parts.values()) == {1.0}


@pytest.mark.parametrize(
    "answer", ["", " \n", "I do not know.", "<think></think><answer></answer>"]
)
def test_no_answer_scores_little_and_is_not_broken(task, scorer, answer):
    for prompt in everything(task):
        score = scorer.score_text(prompt, answer)
        assert score.ok, score.reason
        assert score.value <= 0.1 + 1e-12


def test_the_gold_of_another_prompt_is_mostly_wrong(task, scorer):
    prompts = everything(task)
    pairs = zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    scores = [scorer.score_text(prompt, task.gold(other)) for prompt, other in pairs]
    assert all(score.ok for score in scores)
    by_chance = 0.3 if task.name == "tic_tac_toe" else 0.1  # of nine moves, some are best often
    assert sum(score.value >= 1 for score in scores) < by_chance * len(scores)


def test_the_splits_share_no_problem(task):
    sides = [{identity(p) for p in task.prompts(split)} for split in ("train", "test")]
    assert sides[0].isdisjoint(sides[1])
    assert [len(side) for side in sides] == [len(task.prompts(s)) for s in ("train", "test")]
    assert all(sides)


def test_ids_are_unique_and_prompts_are_not_empty(task):
    prompts = everything(task)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.text.strip() or all(message["content"] for message in prompt.messages)
        assert prompt.tokens == ()  # rendering is the template's work
    assert task.prompts("train") == task.prompts("train")


def test_columns_can_be_written_to_a_run_folder(task):
    for prompt in everything(task):
        assert json.loads(json.dumps(dict(prompt.columns))).keys() == prompt.columns.keys()


def test_the_same_spec_makes_the_same_task(spec, task):
    again = make_task(spec)
    assert again.rewards == task.rewards
    for split in ("train", "test"):
        assert again.prompts(split) == task.prompts(split)
        assert list(map(again.gold, again.prompts(split))) == list(
            map(task.gold, task.prompts(split))
        )


def test_another_seed_makes_other_problems_and_mixes_no_splits(spec, task):
    if "seed" not in options(TASKS[spec["name"].partition(":")[0]]):
        pytest.skip("this task draws nothing")
    other = make_task({**spec, "seed": 1})
    assert other.prompts("train") != task.prompts("train")
    test = {identity(prompt) for prompt in task.prompts("test")}
    assert test.isdisjoint(identity(prompt) for prompt in other.prompts("train"))


TOO_MANY = {
    "sort": {"length": 2, "maximum": 3, "num_train": 17, "num_test": 0},
    "arithmetic": {"digits": 1, "num_train": 10**4},
    "countdown": {"num_numbers": 2, "maximum": 4, "num_train": 10**4},
    "melody": {"num_train": 10**4},
    "guess_number": {"maximum": 12, "num_train": 10**3},
    "tic_tac_toe": {"max_moves": 2, "num_train": 100},
    "gsm8k": {"num_test": 16},
    "reasoning_gym": {"num_train": 10**4, "settings": {"max_terms": 2, "max_digits": 1}},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_problems_than_there_are_is_an_error_with_their_number(name, folder):
    with pytest.raises(ValueError, match=r"(there are|has) \d+ problems"):
        make_task({**spec_of(name, folder), **TOO_MANY[name]})


def test_what_checks_the_answers_finds_gold_right_and_others_wrong(task: Task) -> None:
    """By the task's own word for it; melodies have no right answer, a mixture's reward checks."""
    if task.name == "melody":
        assert task.accuracy is None
        return
    if task.name == "mixture":
        scorer = RewardScorer(task.rewards)
    else:
        name, given = split_spec(task.accuracy, kind="task accuracy")
        scorer = RewardScorer({name: given})
    assert scorer.rewards[0].checks_answer
    prompts = task.prompts("test")[:10]
    for prompt in prompts:
        assert scorer.score_text(prompt, task.gold(prompt)).value == 1.0
        assert scorer.score_text(prompt, "I do not know").value < 1.0
        assert scorer.score_text(prompt, "").value < 1.0
