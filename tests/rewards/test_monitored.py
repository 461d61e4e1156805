"""A reward with weight 0: whatever it does, the score stands."""

import os

import pytest
from rewards.mishaps import MISHAPS, SECONDS, Pooled, rollouts
from rewards.test_scorer import rollout

from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Score


@pytest.mark.parametrize("first", [True, False])
def test_a_monitored_reward_that_breaks_leaves_the_score_and_the_other_parts(first):
    def monitored(completion):
        return 0.5 if completion == "5.0" else float("nan")

    specs = {monitored: 0, "numeric": 2} if first else {"numeric": 2, monitored: 0}
    fine, broke = RewardScorer({**specs, "exact": 1}).score([rollout("5.0"), rollout("5")])
    parts = {"numeric": 1.0, "exact": 0.0, "monitored": 0.5, "monitored/broken": 0.0}
    assert fine == Score(value=2.0, parts=parts)
    assert broke == Score(
        value=3.0,
        parts={"numeric": 1.0, "exact": 1.0, "monitored/broken": 1.0},
        reason="reward 'monitored' returned nan, not a finite number",
    )


def test_a_monitored_scorer_that_breaks_leaves_the_score():
    class Judge:
        def score(self, rollouts):
            raise RuntimeError("no memory")

    (result,) = RewardScorer({Judge(): 0, "exact": 1}).score([rollout("5")])
    assert (result.value, result.state) == (1.0, "ok")
    assert result.parts == {"exact": 1.0, "Judge/broken": 1.0}


def test_a_monitored_reward_that_breaks_does_not_hide_one_that_counts():
    def monitored(completion):
        raise ValueError("nobody minds")

    def counts(completion):
        raise ValueError("this one")

    (result,) = RewardScorer({monitored: 0, counts: 1}).score([rollout("5")])
    assert (result.value, result.state) == (0.0, "invalid")
    assert "this one" in result.reason
    assert "this one" in result.details


@pytest.mark.parametrize("mishap", MISHAPS)
@pytest.mark.parametrize("kind", ["single", "batched"])
def test_a_monitored_reward_that_misbehaves_takes_no_score_with_it(
    mishap: str, kind: str, pooled: Pooled
) -> None:
    """Whatever it does, in whatever place: the others have their say on that sample too."""
    act, state, reason = MISHAPS[mishap]

    def before(n: int) -> float:
        return float(n)

    def monitored(n: int) -> object:
        return act() if n == 7 else 0.5

    def monitored_all(n: list[int]) -> list[object]:
        return [monitored(number) for number in n]

    def after(n: int) -> float:
        return 2.0 * n

    monitored_all.batched = True  # type: ignore[attr-defined]
    looks = monitored if kind == "single" else monitored_all
    name = looks.__name__
    limit = SECONDS if state == "timeout" else 60.0
    scores = pooled({before: 1.0, looks: 0.0, after: 1.0}, seconds=limit).score(rollouts(20))
    assert [(score.state, score.value) for score in scores] == [("ok", 3.0 * n) for n in range(20)]
    assert scores[7].parts == {"before": 7.0, "after": 14.0, f"{name}/broken": 1.0}
    assert f"reward {name!r}" in scores[7].reason
    assert reason in scores[7].reason
    assert scores[8].parts == {"before": 8.0, "after": 16.0, name: 0.5, f"{name}/broken": 0.0}


def test_monitored_rewards_alone_that_all_misbehave_come_to_an_end(pooled: Pooled) -> None:
    def leaves(n: int) -> None:
        os._exit(1)

    def leaves_too(n: int) -> None:
        os._exit(2)

    for score in pooled({leaves: 0.0, leaves_too: 0.0}).score(rollouts(2)):
        assert (score.state, score.value) == ("ok", 0.0)
        assert score.parts == {"leaves/broken": 1.0, "leaves_too/broken": 1.0}
