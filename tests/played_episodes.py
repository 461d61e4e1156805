"""Episodes through the one way to sample and score, by a policy that says what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.types import Prompt, Rollout, Sampling, Score

END = "\0"


class Nothing:
    """Rewards that give nothing: what counts is the environment's score."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


def encode(said: str | Sequence[Mapping[str, Any]], turn: Any = None) -> list[int]:
    """Messages as ``<role:content>``."""
    if isinstance(said, str):
        return code_points(said)
    return code_points("".join(f"<{each['role']}:{each['content']}>" for each in said))


def asked(text: str, **columns: Any) -> Prompt:
    """A chat of one message."""
    message = {"role": "user", "content": text}
    return Prompt(
        id=text, text=text, messages=(message,), tokens=tuple(code_points(text)), columns=columns
    )


def play(env: Any, prompts: Sequence[Prompt], *, says: Sequence[Sequence[str]]) -> list[Rollout]:
    """The rollouts of a policy that says ``says[sample][turn]``; their tokens are checked."""

    def script(prompt: Prompt, sample: int) -> str:
        return says[sample][prompt.text.count(END)]

    found = collect_scored(
        prompts,
        Sampling(max_new_tokens=200),
        engine=ScriptedEngine(script),
        scorer=Nothing(),
        num_samples=len(says),
        seed=0,
        env=env,
        encode=encode,
    )
    for number, rollout in enumerate(found.rollouts):
        said = [turn.text for turn in rollout.turns if turn.sampled]
        lines = says[number % len(says)][: len(said)]
        assert said == list(lines)
        sampled = [token for token, own in zip(rollout.tokens, rollout.mask, strict=True) if own]
        assert sampled == code_points("".join(line + END for line in lines))
    return list(found.rollouts)


def replies(rollout: Rollout) -> list[str]:
    """What the environment said."""
    return [turn.text for turn in rollout.turns if not turn.sampled]


def score(rollout: Rollout) -> Score:
    """The score, which is there."""
    assert rollout.score is not None
    return rollout.score
