"""What every scorer keeps: a score for each rollout, in order, whatever its graders do."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_model import OPTIONS

from posttrain.build.scoring import Reader
from posttrain.data.template import Template
from posttrain.models.load import load_policy
from posttrain.models.reward import reward_from_policy
from posttrain.models.reward_scorer import ModelScorer
from posttrain.protocols import Scorer
from posttrain.rewards.pool import GradingPool
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt, Rollout, Turn

TEXTS = ["5", "", "a longer answer", "\x00", "5"]


def letters(completion: str) -> float:
    return len(completion) / 7


def refuses(completion: str) -> float:
    if not completion:
        raise ValueError("nothing to grade")
    return 1.0


def from_model() -> ModelScorer:
    policy = load_policy("tiny", seed=3, options=OPTIONS)
    template = Template(policy.tokenizer, end_tokens=policy.end_tokens)
    return ModelScorer(
        functools.partial(reward_from_policy, policy, seed=1), render=Reader(template)
    )


def in_workers(close: Callable[[Callable[[], None]], object]) -> RewardScorer:
    scorer = RewardScorer({letters: 1.0, refuses: 0.5})
    pool = GradingPool(scorer.functions, workers=2, seconds=20.0, memory_mb=1024)
    close(pool.close)
    return scorer.with_grader(pool)


SCORERS: dict[str, Callable[[Any], Scorer]] = {
    "functions": lambda close: RewardScorer({letters: 1.0, refuses: 0.5}),
    "functions in workers": in_workers,
    "reward model": lambda close: from_model(),
    "a reward model among functions": lambda close: RewardScorer({letters: 1.0, from_model(): 0.5}),
}


@pytest.fixture(params=SCORERS)
def scorer(request: pytest.FixtureRequest) -> Iterator[Scorer]:
    return SCORERS[request.param](request.addfinalizer)


def rollouts(texts: Sequence[str] = TEXTS) -> list[Rollout]:
    prompt = Prompt(id="0", text="2+3=", tokens=(24, 40), columns={"answer": "5"})
    return [
        Rollout(
            prompt=prompt,
            turns=(
                Turn(tokens=(7,) * (1 + len(text)), logprobs=(-1.0,) * (1 + len(text)), text=text),
            ),
            group=0,
        )
        for text in texts
    ]


def test_one_score_for_each_in_order(scorer: Scorer) -> None:
    given = rollouts()
    scores = scorer.score(given)
    assert len(scores) == len(given)
    assert scorer.score(given[::-1]) == scores[::-1]
    assert scores[0] == scores[4]
    assert len({score.value for score in scores}) > 2
    for score in scores:
        assert abs(score.value) < 1e6
        assert score.ok or score.reason


def test_alone_as_in_company_and_nothing_for_nothing(scorer: Scorer) -> None:
    """A sum over a batch of another shape may round otherwise; nothing more."""
    given = rollouts()
    together = scorer.score(given)
    for rollout, expected in zip(given, together, strict=True):
        (score,) = scorer.score([rollout])
        assert score.value == pytest.approx(expected.value, abs=1e-5)
        assert score.state == expected.state
    assert scorer.score([]) == []


def test_what_a_grader_cannot_grade_is_broken_and_not_wrong(scorer: Scorer) -> None:
    """The empty text is refused by a function, and the long one by a model's context."""
    long = rollouts(["x" * 500])[0]
    scores = scorer.score([*rollouts(), replace(long, group=1)])
    states = [score.state for score in scores]
    assert "invalid" in states
    assert states[0] == states[4] == "ok"
    broken = [score for score in scores if not score.ok]
    assert {score.value for score in broken} == {0.0}
    assert all("nothing to grade" in s.reason or "context" in s.reason for s in broken)
