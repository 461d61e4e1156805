"""An environment in the loop: its words become tokens, its end a score, its failure one broken one.

What every environment keeps to stands in tests/contract/test_envs.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from posttrain.data.collate import collate
from posttrain.envs import ScriptedEnv
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.rollout.waiting import from_plain, to_plain
from posttrain.types import Collected, Observation, Prompt, Rollout, Sampling, Score, Turn

PROMPTS = [Prompt(id=text, text=text, tokens=tuple(code_points(text))) for text in ("a?", "b?")]


class Halves:
    """Half a point for everything, and a part beside it."""

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        return [Score(value=0.5, parts={"half": 0.5}) for _ in rollouts]


class Says:
    """An environment made of a function of (times asked, prompt, turn)."""

    def __init__(self, answer: Callable[[int, Prompt, Turn], Any]) -> None:
        self.answer = answer

    def start(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt": prompt, "times": -1}

    def reply(self, state: dict[str, Any], turn: Turn) -> Any:
        state["times"] += 1
        return self.answer(state["times"], state["prompt"], turn)


def encode(said: Any, turn: Turn) -> list[int]:
    return code_points(said if isinstance(said, str) else f"<{said[0]['content']}>")


def collected(env: Any, *, num_samples: int = 2, greedy: bool = False) -> Collected:
    engine = ScriptedEngine(lambda prompt, sample: f"{sample}.")
    return collect_scored(
        PROMPTS,
        Sampling(max_new_tokens=8),
        engine=engine,
        scorer=Halves(),
        num_samples=num_samples,
        seed=0,
        greedy=greedy,
        env=env,
        encode=encode,
    )


@pytest.mark.parametrize(
    ("said", "tokens", "text"),
    [
        ("so?", (115, 111, 63), "so?"),
        ([{"role": "user", "content": "so?"}], (60, 115, 111, 63, 62), "so?"),
        ((115, 3), (115, 3), ""),
    ],
)
def test_text_messages_and_tokens_are_read_and_not_trained_on(
    said: Any, tokens: tuple[int, ...], text: str
) -> None:
    found = collected(ScriptedEnv(replies=[said]))
    for rollout in found.rollouts:
        asked, reply, again = rollout.turns
        assert (reply.tokens, reply.text, reply.sampled) == (tokens, text, False)
        assert asked.sampled
        assert again.sampled
        expected = (True,) * 3 + (False,) * len(tokens) + (True,) * 3
        assert rollout.mask == expected
        assert rollout.score == Score(value=0.5, parts={"half": 0.5})
    batch = collate(found.rollouts, pad_token=0)
    behind = 2 + 3  # the prompt and the first turn
    assert not batch.mask[:, behind : behind + len(tokens)].any()
    assert batch.mask.sum().item() == 4 * 6


def test_every_sequence_has_a_state_of_its_own() -> None:
    """Samples of one prompt that say the same are told apart; so are greedy ones."""
    found = collected(Says(lambda times, prompt, turn: f"{prompt.id}{times}" if times < 2 else 1.0))
    said = [[turn.text for turn in rollout.turns[1::2]] for rollout in found.rollouts]
    assert said == [["a?0", "a?1"]] * 2 + [["b?0", "b?1"]] * 2
    greedy = collected(ScriptedEnv(replies=["so?"], score=0.25), greedy=True).rollouts
    baselines = [rollout.greedy for rollout in greedy if rollout.greedy is not None]
    assert len(baselines) == 4
    assert {len(r.turns) for r in baselines} == {3}
    assert {r.score.value for r in baselines if r.score is not None} == {0.25}


def test_the_score_that_ends_a_rollout_counts_and_the_rewards_are_kept_beside_it() -> None:
    own = Score(value=2.0, parts={"steps": 3.0}, reason="won")
    for given, parts in ((own, {"env": 2.0, "env/steps": 3.0}), (2, {"env": 2.0})):
        for rollout in collected(Says(lambda *_, given=given: given)).rollouts:
            assert rollout.score is not None
            assert (rollout.score.value, rollout.score.ok) == (2.0, True)
            assert rollout.score.parts == {"half": 0.5, **parts}
            assert len(rollout.turns) == 1


@pytest.mark.parametrize(
    ("end", "value", "parts"),
    [
        (1.0, 0.25, {"half": 0.5, "env": 0.25, "env/earned": -0.75}),
        (None, -0.25, {"half": 0.5, "earned": -0.75}),
    ],
)
def test_what_turns_have_earned_is_in_the_score(
    end: float | None, value: float, parts: dict[str, float]
) -> None:
    """−1 for a turn, 0.5, −0.25 and 0 for the tokens of the next; also where no score ends it."""
    said = [Observation("no", reward=-1.0), Observation("no", reward=[0.5, -0.25, 0.0]), end]
    found = collected(Says(lambda times, prompt, turn: said[times]))
    for rollout in found.rollouts:
        assert rollout.score is not None
        assert (rollout.score.value, rollout.score.parts) == (value, parts)
        assert rollout.earned == (-1.0, 0.25, value + 0.75)
        assert rollout.turns[3].token_rewards == (0.5, -0.25, 0.0)
    assert from_plain(to_plain([found], PROMPTS), PROMPTS) == [found]


def test_the_limit_that_ended_a_rollout_is_kept_while_it_waits() -> None:
    found = collected(
        ScriptedEnv(replies=["so?"], score=Score(value=1.0, token_rewards=(1.0, 0.0, 0.0)))
    )
    ended = [replace(rollout, limit="max_turns") for rollout in found.rollouts]
    found = replace(found, rollouts=ended)
    assert from_plain(to_plain([found], PROMPTS), PROMPTS) == [found]
    assert ended[0].score is not None
    assert ended[0].score.token_rewards == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Observation("no", reward=[1.0]), "1 numbers for a turn of 3 tokens"),
        (Observation("no", reward=math.nan), "not a finite number"),
        (Score(value=1.0, token_rewards=(1.0,)), "1 token_rewards for a turn of 3 tokens"),
        ("", "an empty reply"),
        ([], "an empty reply"),
        ({"a": 1}, "a dict, not a number"),
        (math.nan, "not a finite number"),
        ([{"role": "user"}], "'content'"),
        (Score(value=0.0, state="timeout", reason="the tool hung"), "the tool hung"),
    ],
)
def test_what_cannot_be_read_breaks_that_one_rollout(wrong: Any, reason: str) -> None:
    env = Says(lambda times, prompt, turn: wrong if prompt.id == "a?" else 1.0)
    scores = [rollout.score for rollout in collected(env).rollouts]
    assert [score is not None and score.ok for score in scores] == [False, False, True, True]
    assert scores[0] is not None
    assert reason in scores[0].reason


def test_what_raises_breaks_that_one_rollout_with_its_line() -> None:
    def answer(times: int, prompt: Prompt, turn: Turn) -> float:
        if turn.text == "1.":
            raise RuntimeError("no tool today")
        return 1.0

    scores = [rollout.score for rollout in collected(Says(answer)).rollouts]
    assert [score.state for score in scores if score is not None] == ["ok", "invalid"] * 2
    assert scores[1] is not None
    assert scores[1].reason.startswith(
        "the environment raised RuntimeError: no tool today (test_env"
    )
    assert "no tool today" in scores[1].details


def test_without_a_tokenizer_text_is_an_error_that_says_so() -> None:
    engine = ScriptedEngine(lambda prompt, sample: "x")
    found = collect_scored(
        PROMPTS,
        Sampling(),
        engine=engine,
        scorer=Halves(),
        num_samples=1,
        seed=0,
        env=ScriptedEnv(replies=["so?"]),
    )
    reasons = [r.score.reason for r in found.rollouts if r.score is not None]
    assert all("give collect_scored encode=" in reason for reason in reasons)
    assert len(reasons) == 2


def test_two_turns_that_wait_to_be_learned_come_back_exactly() -> None:
    found = collected(ScriptedEnv(replies=["so?"], score=0.25), greedy=True)
    assert from_plain(to_plain([found], PROMPTS), PROMPTS) == [found]


def test_rewards_score_the_last_turn_of_the_policy() -> None:
    said = [Turn(tokens=(7,), logprobs=(-1.0,), text=text) for text in ("3", "2")]
    asked = Turn(tokens=(9,), text="sure?")
    prompt = Prompt(id="0", text="1+1=", columns={"answer": "2"})
    rollout = Rollout(prompt=prompt, turns=(said[0], asked, said[1]), group=0)
    assert rollout.text == "3\n2"
    [score] = RewardScorer({"numeric": {"weight": 1.0, "extract": "whole"}}).score([rollout])
    assert score.value == 1.0
