"""What ends an episode where its environment does not, and what it says before the first turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chat_families import end_tokens, family_tokenizer
from rollout.cases import ragged, spell

from posttrain.data.template import Template
from posttrain.envs.env_pool import EnvPool
from posttrain.models.load import load_policy
from posttrain.protocols import Engine
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.rollout.environment import Environment
from posttrain.types import Collected, Observation, Prompt, Rollout, Sampling, Score, Turn

PROMPTS = [Prompt(id=text, text=text, tokens=tuple(code_points(text))) for text in ("a?", "b?")]


class Half:
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.5, parts={"half": 0.5}) for _ in rollouts]


class Endless:
    """A quarter of a point for each turn, for ever."""

    def start(self, prompt: Prompt) -> dict[str, Any]:
        return {"turns": 0, "prompt": prompt.text}

    def reply(self, state: dict[str, Any], turn: Turn) -> Any:
        state["turns"] += 1
        return Observation("go on", reward=0.25)


class Counting(Endless):
    """It knows what an episode is worth as it stands, and what there was in it."""

    def score(self, state: dict[str, Any]) -> float:
        return 10.0 * state["turns"]

    def counts(self, state: dict[str, Any]) -> dict[str, float]:
        return {"turns": state["turns"], "asked": 1}


class Broken(Counting):
    """It cannot say, of one of the prompts."""

    def score(self, state: dict[str, Any]) -> float:
        if state["prompt"] == "a?":
            raise LookupError("no score")
        return super().score(state)

    def counts(self, state: dict[str, Any]) -> dict[str, float]:
        raise LookupError("no counts")


@contextmanager
def environment(env: Any, *, workers: int = 1, **more: Any) -> Iterator[Environment]:
    encode = more.pop("encode", lambda said, turn: code_points(said))
    made = Environment(pool=EnvPool(env, workers=workers), encode=encode, **more)
    try:
        yield made
    finally:
        made.close()


def collected(
    env: Environment,
    *,
    engine: Engine | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    max_new_tokens: int = 4,
) -> Collected:
    with torch.no_grad():
        return collect_scored(
            prompts,
            Sampling(max_new_tokens=max_new_tokens),
            engine=engine or ScriptedEngine(lambda prompt, sample: f"{sample}."),
            scorer=Half(),
            num_samples=2,
            seed=3,
            env=env,
        )


# Of turns of 3 tokens and replies of 5, with 4 for the turn to come: 3 + 5 + 3 + 5 + 4 = 20.
LIMITS = [
    ({"max_turns": 1}, "max_turns", 1),
    ({"max_turns": 3}, "max_turns", 3),
    ({"max_tokens": 19}, "max_tokens", 2),
    ({"max_tokens": 20}, "max_tokens", 3),
    ({"max_tokens": 20, "max_turns": 2}, "max_turns", 2),
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("limits", "limit", "turns"), LIMITS)
def test_a_limit_ends_an_episode(
    limits: dict[str, int], limit: str, turns: int, workers: int
) -> None:
    """With the environment's score where it has one; else with the rewards'."""
    with environment(Counting(), workers=workers, **limits) as env:
        counting = collected(env)
    with environment(Endless(), workers=workers, **limits) as env:
        endless = collected(env)
    earned = 0.25 * turns
    parts = {"half": 0.5, "env": 10.0 * turns + earned, "env/earned": earned}
    for rollout in counting.rollouts:
        assert rollout.limit == limit
        assert [turn.sampled for turn in rollout.turns] == ([True, False] * turns)[:-1]
        assert rollout.score is not None
        assert rollout.score.value == 10.0 * turns + earned
        assert rollout.score.parts == {**parts, "env/turns": turns, "env/asked": 1}
        assert rollout.earned == (*[0.25] * (turns - 1), 10.0 * turns + 0.25)
    for rollout, other in zip(endless.rollouts, counting.rollouts, strict=True):
        assert (rollout.turns, rollout.limit) == (other.turns, limit)
        assert rollout.score is not None
        assert rollout.score.value == 0.5 + earned
        assert rollout.score.parts == {"half": 0.5, "earned": earned}


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_cannot_say_what_an_episode_is_worth_breaks_that_one(workers: int) -> None:
    """What it cannot count breaks no score, but is told."""
    with environment(Broken(), workers=workers, max_turns=2) as env:
        found = collected(env)
    scores = [rollout.score for rollout in found.rollouts if rollout.score is not None]
    assert [score.state for score in scores] == ["invalid"] * 2 + ["ok"] * 2
    assert "raised LookupError: no score" in scores[0].reason
    assert scores[2].value == 20.5
    assert "env/turns" not in scores[2].parts
    assert {n: c for n, c in found.env.items() if n.startswith("errors/")} == {
        "errors/raised": 2.0,
        "errors/counts": 2.0,
    }


def engines(model: Any, ends: Sequence[int]) -> list[Engine]:
    kinds = (NativeEngine, TransformersEngine)
    return [kind(model, end_tokens=ends, decode=spell) for kind in kinds]


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("tiny", seed=5, options={"hidden_size": 16, "max_positions": 64})


@pytest.mark.parametrize("kind", [0, 1])
def test_the_context_ends_an_episode(policy: Any, kind: int) -> None:
    """A reply behind which no turn has room is not read; the turn that it answers is the last."""
    engine = engines(policy.model, [])[kind]
    with environment(Counting(), encode=lambda said, turn: [7] * 10) as env:
        found = collected(env, engine=engine, prompts=ragged(3, 20), max_new_tokens=8)
    for rollout in found.rollouts:
        turns = sum(turn.sampled for turn in rollout.turns)
        length = len(rollout.prompt.tokens) + len(rollout.tokens)
        assert rollout.limit == "max_tokens"
        assert rollout.turns[-1].sampled
        assert length <= 64 < length + 10 + 8
        assert rollout.score is not None
        assert rollout.score.value == 10.25 * turns
        assert rollout.score.parts["env/turns"] == turns


class Twice(Endless):
    """Two turns, and a point."""

    def reply(self, state: dict[str, Any], turn: Turn) -> Any:
        said = super().reply(state, turn)
        return said if state["turns"] < 2 else 1.0


class Opens(Twice):
    """It says something before the first turn, of every episode or of those that draw so."""

    def __init__(self, text: str = "", *, every: bool = True) -> None:
        self.text, self.every = text, every

    def start(self, prompt: Prompt, *, seed: int = 0) -> dict[str, Any]:
        return {**super().start(prompt), "opens": self.every or seed % 2 == 0}

    def opening(self, state: dict[str, Any]) -> str:
        return self.text if state["opens"] else ""


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("text", ["", "9+"])
def test_a_prompt_for_each_sample_draws_the_same_tokens(policy: Any, text: str, kind: int) -> None:
    """Also beside samples that read an opening: draws are those of the sequence's number."""
    engine, prompts = engines(policy.model, policy.end_tokens)[kind], ragged(3, 9, 5)
    again = lambda prompt: replace(prompt, tokens=(*prompt.tokens, 11, 12))  # noqa: E731
    options: dict[str, Any] = {"encode": lambda said, turn: [7, 8], "render": again}
    with environment(Twice(), **options) as env:
        expected = collected(env, engine=engine, prompts=prompts).rollouts
    with environment(Opens(text, every=not text), **options) as env:
        found = collected(env, engine=engine, prompts=prompts).rollouts
    opened = [rollout.prompt.tokens[-2:] == (11, 12) for rollout in found]
    assert any(opened) == bool(text)
    assert not all(opened)
    assert [rollout.group for rollout in found] == [0, 0, 1, 1, 2, 2]
    for rollout, other, reads in zip(found, expected, opened, strict=True):
        assert rollout.score == other.score
        if reads:
            assert rollout.prompt.text == other.prompt.text + text
        else:
            assert rollout == other


@pytest.mark.parametrize("chat", [True, False])
def test_an_opening_stands_behind_the_last_message_of_the_user(chat: bool) -> None:
    tokenizer = family_tokenizer("qwen3")
    template = Template(tokenizer, chat=chat, end_tokens=end_tokens("qwen3", tokenizer))
    messages = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Ready?"})
    asked = Prompt(id="0", text="Ready?", messages=messages if chat else ())
    asked = replace(asked, tokens=template.render(asked).tokens)
    whole = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Ready? Go."})
    wanted = template.render(Prompt(id="0", text="Ready? Go.", messages=whole if chat else ()))
    read = []

    def script(prompt: Prompt, sample: int) -> str:
        read.append(prompt.tokens)
        return "yes"

    engine = ScriptedEngine(script, decode=lambda tokens: tokenizer.decode(list(tokens)))
    options: dict[str, Any] = {"encode": template.encode_reply, "render": template.render}
    with environment(Opens(" Go."), **options) as env:
        found = collected(env, engine=engine, prompts=[asked])
    assert {rollout.prompt.tokens for rollout in found.rollouts} == {wanted.tokens}
    assert set(read) == {wanted.tokens}
    assert wanted.tokens != asked.tokens
    assert {r.score.value for r in found.rollouts if r.score is not None} == {1.25}


@pytest.mark.parametrize(
    ("longest", "kind", "reason"),
    [
        (12, "too_long", "leaves no room in the context of 12 tokens"),
        (None, "unreadable", "opened with what cannot be read: ValueError: no such message"),
    ],
)
def test_an_opening_that_cannot_be_read_breaks_its_episode(
    longest: int | None, kind: str, reason: str
) -> None:
    def render(prompt: Prompt) -> Prompt:
        if longest is None:
            raise ValueError("no such message")
        return replace(prompt, tokens=tuple(code_points(prompt.text)))

    with environment(Opens(" 6 more"), render=render, longest=longest) as env:
        found = collected(env)
    for rollout in found.rollouts:
        assert rollout.score is not None
        assert rollout.score.state == "invalid"
        assert reason in rollout.score.reason
        assert len(rollout.turns) == 1
    assert found.env[f"errors/{kind}"] == 4.0


class Says(Endless):
    """It says what it was made with, as an opening or to the first turn."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def reply(self, state: dict[str, Any], turn: Turn) -> Any:
        return self.said


@pytest.mark.parametrize(("said", "reason"), [
    ("half \udcff", r"can't encode character '\udcff' in position 5: surrogates not allowed"),
    ([{"role": "user", "content": "\ud800"}], "in position 0: surrogates not allowed"),
    ([5, 99], "token 99, and the policy knows 0 to 98"),
    ([-1, 5], "token -1, and the policy knows 0 to 98"),
    (Observation("so?", reward=None), "None, not a number; an Observation's reward is one, or"),
    (np.array([1.0, 2.0]), "a ndarray with 2 elements, not a number; return text"),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_says_why(said: Any, reason: str, workers: int) -> None:
    """It breaks its episode, and never the run: in a model such a token is an error of its own."""
    with environment(Says(said), workers=workers, vocabulary=99) as env:
        found = collected(env)
    for rollout in found.rollouts:
        assert rollout.score is not None
        assert rollout.score.state == "invalid"
        assert reason in rollout.score.reason
    assert found.env["errors/unreadable"] == 4.0


def test_an_opening_with_half_of_a_character_breaks_its_episode() -> None:
    with environment(Opens("\udcff"), render=lambda prompt: prompt) as env:
        found = collected(env)
    assert found.env["errors/unreadable"] == 4.0
