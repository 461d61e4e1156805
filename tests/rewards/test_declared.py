"""What a reward declares of itself: that it checks the answer, and the most that it gives."""

from typing import Any

import pytest
from rewards.mishaps import Pooled, rollouts

from posttrain.config.specs import complete_reward
from posttrain.rewards import REWARDS, declare
from posttrain.rewards.bound import bind
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt

PROMPT = Prompt(id="0", text="2+3=", columns={"answer": "5"})


def stars(completion: str) -> float:
    return float(len(completion))


def test_the_rewards_that_check_answers_are_known_by_their_own_word() -> None:
    checking = {name for name in REWARDS if bind(name, options_of(name)).checks_answer}
    known = {"exact", "one_of", "numeric", "math", "sort", "countdown", "code", "reasoning_gym"}
    assert checking == known


def test_penalties_have_full_marks_where_nothing_is_taken_off() -> None:
    most = {name: bind(name, options_of(name)).full_marks for name in REWARDS}
    assert {name for name, value in most.items() if value == 0.0} == {
        "length",
        "overlong",
        "repetition",
    }
    assert set(most.values()) == {0.0, 1.0}


def options_of(name: str) -> dict[str, Any]:
    return {
        "length": {"target": 1},
        "overlong": {"limit": 4, "buffer": 2},
        "judge": {"url": "http://localhost", "model": "m"},
    }.get(name, {})


@pytest.mark.parametrize("how", ["table", "decorator", "attribute"])
def test_a_maximum_is_kept_and_a_score_above_it_is_broken(how: str) -> None:
    """The score at the maximum stands; one above it counts for nothing, and says so."""
    given: dict[str, Any] = {"weight": 1.0}

    def own(completion: str) -> float:
        return stars(completion)

    if how == "table":
        given["maximum"] = 3
    elif how == "decorator":
        own = declare(maximum=3)(own)
    else:
        own.maximum = 3  # type: ignore[attr-defined]
    scorer = RewardScorer({own: given})
    assert scorer.rewards[0].full_marks == 3.0
    assert scorer.score_text(PROMPT, "***").value == 3.0
    above = scorer.score_text(PROMPT, "****")
    assert (above.state, above.value) == ("invalid", 0.0)
    assert above.reason.startswith("reward 'own' returned 4, above its maximum of 3; fix the rew")


@pytest.mark.parametrize("last", [{"maximum": 10}, {"checks_answer": True}])
def test_declarations_add_up_in_any_order(last: dict[str, Any]) -> None:
    """Only what is given is set: the other word, and one that is taken back, stay as they were."""
    both = {"checks_answer": True, "maximum": 10}

    @declare(**last)
    @declare(**{name: value for name, value in both.items() if name not in last})
    def own(completion: str) -> float:
        return stars(completion)

    bound = bind(own, {})
    assert (bound.checks_answer, bound.full_marks) == (True, 10.0)
    assert not bind(declare(checks_answer=False)(own), {}).checks_answer


def test_a_maximum_holds_in_worker_processes(pooled: Pooled) -> None:
    def number(n: int) -> float:
        return float(n)

    scores = pooled({number: {"weight": 1.0, "maximum": 1}}).score(rollouts(3))
    assert [score.ok for score in scores] == [True, True, False]


def test_the_option_of_a_function_keeps_its_name() -> None:
    reward = bind("length", {"target": 0, "per_token": 1.0, "maximum": 0.5})
    assert reward.maximum == 0.0
    assert complete_reward("length", {"weight": 1.0, "target": 0, "maximum": 0.5})["maximum"] == 0.5
    done = complete_reward("exact", {"weight": 1.0, "maximum": 1})
    assert done == {"weight": 1.0, "maximum": 1.0, "extract": "whole", "ignore_case": False}


@pytest.mark.parametrize("maximum", ["10", True, float("inf")])
def test_a_maximum_is_a_number(maximum: Any) -> None:
    with pytest.raises(ValueError, match="its maximum must be a finite number"):
        bind(stars, {"maximum": maximum})
    with pytest.raises(ValueError, match="rewards 'exact': its maximum must be a finite number"):
        complete_reward("exact", {"weight": 1.0, "maximum": maximum})


def test_a_monitored_reward_is_added_under_a_name_that_is_free() -> None:
    def exact(completion: str) -> float:
        return 1.0

    scorer, name = RewardScorer({exact: 2.0}).monitoring("exact", {"ignore_case": True})
    score = scorer.score_text(PROMPT, "4")
    assert name == "task:exact"
    assert (score.value, dict(score.parts)) == (2.0, {"exact": 1.0, "task:exact": 0.0})
