"""What every reward keeps: better answers score more, no text breaks it, and it repeats itself."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from rewards.test_judge import Server

from posttrain.rewards import REWARDS
from posttrain.rewards.scorer import RewardScorer
from posttrain.tasks import make_task
from posttrain.types import Prompt, Rollout, Turn

# name: options, columns, a good answer, a worse one
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "exact": ({}, {"answer": "5"}, "5", "6"),
    "one_of": ({}, {"answers": ["4", "5"]}, "5", "6"),
    "numeric": ({}, {"answer": "5"}, "<answer>5</answer>", "<answer>6</answer>"),
    "math": ({}, {"answer": "1/2"}, r"\boxed{0.5}", r"\boxed{2}"),
    "format": ({}, {}, "<think>a</think><answer>b</answer>", "b"),
    "length": ({"target": 3, "per_token": 0.1}, {}, "abc", "abcdefghi"),
    "overlong": ({"limit": 10, "buffer": 5}, {}, "abc", "abcdefghij"),
    "repetition": ({}, {}, "a b c d e f g h", "a a a a a a a a"),
    "judge": ({"model": "any"}, {}, "5", "6"),
    "sort": ({}, {"numbers": [3, 1, 2]}, "1 2 3", "3 1 2"),
    "code": (
        {"sandbox": "none", "extract": "whole"},
        {"tests": "assert square(2) == 4\nassert square(3) == 9\n"},
        "def square(n):\n    return n * n\n",
        "def square(n):\n    return n + n\n",
    ),
}
OF_TASKS = {
    "countdown": "countdown",
    "melody": "melody",
    "reasoning_gym": "reasoning_gym:chain_sum",
}
HOSTILE = ["", " \n", "\x00", "\ud800", "<answer>" * 500, "9" * 5000, "(" * 3000, "{}[]\\boxed{"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A judge that finds the answer 5 good, and no other."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()

    def judged(handler: Any) -> None:
        asked = handler.body["messages"][-1]["content"]
        Server.say(handler, "<score>10</score>" if "\n5\n" in asked else "<score>2</score>")

    made.replies = [judged]
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(params=REWARDS)
def case(
    request: pytest.FixtureRequest,
) -> tuple[RewardScorer, Prompt, str, str]:
    name = request.param
    if name in OF_TASKS:
        if name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
            pytest.skip("reasoning-gym is not installed")
        task = make_task({"name": OF_TASKS[name], "num_train": 2, "num_test": 1})
        prompt = task.prompts("train")[0]
        options = dict(task.rewards[name]) if isinstance(task.rewards[name], dict) else {}
        return RewardScorer({name: options}), prompt, task.gold(prompt), "adfadf"
    options, columns, good, worse = CASES[name]
    if name == "judge":
        options = {**options, "url": request.getfixturevalue("server").url}
    return RewardScorer({name: options}), Prompt(id="0", text="?", columns=columns), good, worse


def rollout(prompt: Prompt, text: str) -> Rollout:
    """A completion with a token for every character."""
    tokens = tuple(ord(character) for character in text)
    turn = Turn(tokens=tokens, logprobs=(-1.0,) * len(tokens), text=text)
    return Rollout(prompt=prompt, turns=(turn,), group=0)


def test_every_reward_is_here() -> None:
    assert {*CASES, *OF_TASKS} == set(REWARDS)


def test_a_better_answer_scores_more_in_any_order(
    case: tuple[RewardScorer, Prompt, str, str],
) -> None:
    scorer, prompt, good, worse = case
    scorer.check_columns(prompt)
    forwards = scorer.score([rollout(prompt, good), rollout(prompt, worse)])
    backwards = scorer.score([rollout(prompt, worse), rollout(prompt, good)])
    assert forwards == backwards[::-1]
    assert all(score.ok for score in forwards), forwards
    assert forwards[0].value > forwards[1].value
    (reward,) = scorer.rewards
    assert reward.full_marks is not None
    assert forwards[0].value <= reward.full_marks + 1e-9


def test_no_text_breaks_it(case: tuple[RewardScorer, Prompt, str, str]) -> None:
    """A wrong answer is a low score, however it is written."""
    scorer, prompt, good, _ = case
    best, *scores = scorer.score([rollout(prompt, text) for text in (good, *HOSTILE)])
    for text, score in zip(HOSTILE, scores, strict=True):
        assert score.ok, (text[:20], score.reason)
        assert score.value <= best.value, text[:20]
