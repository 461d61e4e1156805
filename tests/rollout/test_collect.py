"""Rollouts from a scripted engine: order, groups, and an engine that breaks its promise."""

from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.protocols import Engine
from posttrain.rollout import collect
from posttrain.rollout.engines import ScriptedEngine
from posttrain.types import Prompt, Rollout, Sampling, Turn

PROMPTS = [Prompt(id="0", text="b"), Prompt(id="1", text="a"), Prompt(id="2", text="b")]
SCRIPT = {"a": ["one", "two"], "b": ["three"]}


def test_groups_are_the_places_of_the_prompts() -> None:
    rollouts = collect(ScriptedEngine(SCRIPT), PROMPTS, sampling=Sampling(), num_samples=2, seed=0)
    assert [(r.prompt.id, r.group, r.text) for r in rollouts] == [
        ("0", 0, "three"),
        ("0", 0, "three"),
        ("1", 1, "one"),
        ("1", 1, "two"),
        ("2", 2, "three"),
        ("2", 2, "three"),
    ]
    assert all(rollout.score is None for rollout in rollouts)
    assert collect(ScriptedEngine(SCRIPT), [], sampling=Sampling(), num_samples=2, seed=0) == []


def test_seed_and_sampling_reach_the_engine() -> None:
    seen = []

    class Spy(ScriptedEngine):
        def generate(
            self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
        ) -> list[list[Rollout]]:
            seen.append((sampling.temperature, num_samples, seed))
            return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)

    collect(Spy(SCRIPT), PROMPTS, sampling=Sampling(temperature=0.3), num_samples=4, seed=9)
    assert seen == [(0.3, 4, 9)]


def test_a_missing_completion_is_noticed() -> None:
    class Short(ScriptedEngine):
        def generate(
            self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
        ) -> list[list[Rollout]]:
            answers = super().generate(prompts, sampling, num_samples=num_samples, seed=seed)
            return [answers[0], answers[1][:1], answers[2]]

    with pytest.raises(
        ValueError, match=r"engine Short: asked for 2 .* 3 prompts, got \[2, 1, 2\]"
    ):
        collect(Short(SCRIPT), PROMPTS, sampling=Sampling(), num_samples=2, seed=0)


def test_an_engine_without_turns_serves_without_an_environment_alone() -> None:
    class Wordless(ScriptedEngine):
        def generate(
            self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
        ) -> list[list[Rollout]]:
            return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)

    class Passing(Wordless):
        def generate(self, *given: Any, **options: Any) -> list[list[Rollout]]:
            return ScriptedEngine.generate(self, *given, **options)

    def asked(engine: Any, reply: Any) -> list[str]:
        asking = {"sampling": Sampling(), "num_samples": 1, "seed": 0, "reply": reply}
        return [rollout.text for rollout in collect(engine, PROMPTS, **asking)]

    said = ["three", "one", "three"]
    assert asked(Wordless(SCRIPT), None) == said
    with pytest.raises(ValueError, match=r"engine Wordless: its generate has no parameter reply"):
        asked(Wordless(SCRIPT), lambda rollout, number: None)
    assert asked(Passing(SCRIPT), lambda rollout, number: None) == said


def test_scripted_tokens_logprobs_and_limits() -> None:
    engine: Engine = ScriptedEngine(SCRIPT, end_token=9, logprob=-0.5, version=4)
    ((whole,),) = engine.generate([PROMPTS[0]], Sampling(), num_samples=1, seed=0)
    assert whole.tokens == (*map(ord, "three"), 9)
    assert whole.logprobs == (-0.5,) * 6
    assert (whole.text, whole.stop_reason, whole.version) == ("three", "stop", 4)
    ((cut,),) = engine.generate([PROMPTS[0]], Sampling(max_new_tokens=2), num_samples=1, seed=0)
    assert (cut.tokens, cut.text, cut.stop_reason) == (tuple(map(ord, "th")), "th", "length")
    ((full,),) = engine.generate([PROMPTS[0]], Sampling(max_new_tokens=6), num_samples=1, seed=0)
    assert full == whole


def test_a_scripted_completion_is_given_as_it_is_but_for_the_version() -> None:
    given = Turn(tokens=(1, 2), logprobs=(-3.0, -4.0), text="x", stop_reason="length", version=0)
    engine = ScriptedEngine(lambda prompt, sample: given, version=2)
    ((found,),) = engine.generate([PROMPTS[0]], Sampling(), num_samples=1, seed=0)
    assert (found.tokens, found.logprobs, found.text) == ((1, 2), (-3.0, -4.0), "x")
    assert (found.stop_reason, found.version) == ("length", 2)


def test_a_prompt_without_a_line_in_the_script_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"prompt '7': the script has no answer to 'c'.*'a', 'b'"):
        ScriptedEngine(SCRIPT).generate(
            [Prompt(id="7", text="c")], Sampling(), num_samples=1, seed=0
        )
    with pytest.raises(ValueError, match="num_samples"):
        ScriptedEngine(SCRIPT).generate(PROMPTS, Sampling(), num_samples=0, seed=0)
