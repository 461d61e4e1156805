"""Rewards as others write them: TRL's signature, lists, coroutines, classes, partials."""

import functools
from typing import Any

import pytest

from posttrain.rewards.bound import bind
from posttrain.rewards.pool import GradingPool
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.whole.from_python import _weights
from posttrain.types import Prompt, Rollout, Turn

TEXT = Prompt(id="a", text="2+3=", columns={"answer": "5", "level": 1})
CHAT = Prompt(
    id="b", text="", messages=({"role": "user", "content": "2+3?"},), columns={"answer": "5"}
)


def rollout(prompt: Prompt, text: str) -> Rollout:
    turn = Turn(tokens=(1, 2), logprobs=(0.0, 0.0), text=text, version=0)
    return Rollout(prompt=prompt, turns=(turn,), group=0)


def right(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> Any:
    """TRL's: lists in, a list out, and None where it does not apply."""
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["completion_ids"])
    assert kwargs["trainer_state"] is None
    kwargs["log_metric"]("seen", 1.0)
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [
        None if text == "pass" else float(text == gold)
        for text, gold in zip(texts, answer, strict=True)
    ]


def length(completions: list[str]) -> list[float]:
    return [len(completion) / 10 for completion in completions]


async def awaited(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


class Scaled:
    """A reward that is a class, with an option."""

    def __init__(self, *, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, completion: str) -> float:
        return self.factor * len(completion)


def scaled(completion: str, *, factor: float = 1.0) -> float:
    return factor * len(completion)


def everything(completion: str, **columns: Any) -> float:
    return float(len(columns))


def test_trls_signature_on_text_and_on_messages() -> None:
    scorer = RewardScorer({right: 1.0, length: 0.5})
    (one, two) = scorer.score([rollout(TEXT, "5"), rollout(TEXT, "66")])
    assert (one.value, one.parts) == (pytest.approx(1.05), {"right": 1.0, "length": 0.1})
    assert two.value == pytest.approx(0.1)
    (chat,) = RewardScorer({right: 1.0}).score([rollout(CHAT, "5")])
    assert chat.value == 1.0


def test_none_is_not_applicable_and_all_none_is_broken() -> None:
    """A reward that does not apply is left out of the sum, as in TRL; with none left, no score."""
    scorer = RewardScorer({right: 1.0, length: 0.5})
    (score,) = scorer.score([rollout(TEXT, "pass")])
    assert (score.value, score.parts) == (pytest.approx(0.2), {"length": 0.4})
    (alone,) = RewardScorer({right: 1.0}).score([rollout(TEXT, "pass")])
    assert (alone.state, alone.reason) == (
        "invalid",
        "no reward applies: each of them returned None",
    )
    (own,) = RewardScorer({lambda completion: None: 1.0}).score([rollout(TEXT, "x")])
    assert own.state == "invalid"  # of our own signature it is a fault


def test_the_same_in_workers() -> None:
    scorer = RewardScorer({right: 1.0, awaited: 1.0})
    pool = GradingPool(scorer.functions, workers=1)
    try:
        rollouts = [rollout(TEXT, text) for text in ("5", "6", "pass")]
        scores = scorer.with_grader(pool).score(rollouts)
    finally:
        pool.close()
    assert [score.value for score in scores] == [1.5, 0.5, 0.5]


def test_classes_partials_and_all_columns() -> None:
    cases: list[tuple[Any, Any, float]] = [
        (Scaled, {"weight": 1.0, "factor": 3.0}, 6.0),
        (Scaled(), 1.0, 4.0),
        (functools.partial(scaled, factor=5.0), 1.0, 10.0),
        (everything, 1.0, 5.0),  # answer, level, prompt, num_tokens, stop_reason
    ]
    for reward, given, expected in cases:
        (score,) = RewardScorer({reward: given}).score([rollout(TEXT, "xx")])
        assert score.value == expected, reward
    assert bind(functools.partial(scaled, factor=5.0), 1.0).name == "scaled"


def test_how_it_is_called_is_said() -> None:
    assert bind(right, 1.0).signature == "TRL's signature: lists; None where it does not apply"
    assert bind(everything, 1.0).signature == "every column by **kwargs"
    assert bind(scaled, 1.0).signature == ""


def test_a_list_of_rewards_has_weights_of_one() -> None:
    assert _weights([right, length]) == {right: 1.0, length: 1.0}
    with pytest.raises(ValueError, match="is listed twice"):
        _weights([right, right])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: [1.0] * 9, "returned list of 9; expected a list of 1, one score"),
        (lambda completions: 1.0, "returned float; expected a list of 1, one score"),
        (lambda completions: ["a"], "a str, not a number"),
        (lambda completions: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_faults_of_trls_signature(reward: Any, message: str) -> None:
    (score,) = RewardScorer({reward: 1.0}).score([rollout(TEXT, "x")])
    assert score.state == "invalid"
    assert message in score.reason


def test_a_column_that_is_not_there() -> None:
    def wants(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [1.0]

    # What is nearest by its letters, 'completion', is no column of the row.
    told = r"needs the column 'solution', .*\(its other columns: [^)]*\); add the column"
    with pytest.raises(ValueError, match=told):
        RewardScorer({wants: 1.0}).check_columns(TEXT)
    with pytest.raises(ValueError, match=r"cannot be made .* give an instance"):
        bind(type("Needs", (), {"__init__": lambda self, x: None, "__call__": scaled}), 1.0)
