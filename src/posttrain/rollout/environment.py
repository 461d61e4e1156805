"""An environment in the place of an engine's reply: what it says becomes a turn, or a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.protocols import Env
from posttrain.rewards.bound import BoundReward, checked, raised
from posttrain.types import Observation, Rollout, Score, Turn

Encode = Callable[[str | Sequence[Mapping[str, Any]], Turn], Sequence[int]]
"""The tokens of a text, or of messages, that follow this turn of the policy."""


class Conversations:
    """The conversations of one call of an engine, each with a state of its own.

    Text and messages become tokens by ``encode``; tokens are taken as they are, and what was
    sampled is never encoded. ``scores`` are those with which the environment ended a sequence, by
    its number; where it raised, or said nothing that can be read, the score is broken.
    """

    def __init__(self, env: Env, *, encode: Encode) -> None:
        self.scores: dict[int, Score] = {}
        self._env = env
        self._encode = encode
        self._judge = BoundReward(name="env", weight=1.0, function=float)  # for its words
        self._states: dict[int, Any] = {}

    def __call__(self, rollout: Rollout, number: int) -> Turn | None:
        """What the environment answers to the last turn of a sequence; None where it ends it."""
        try:
            if number not in self._states:
                self._states[number] = self._env.start(rollout.prompt)
            answer = self._env.reply(self._states[number], rollout.turns[-1])
            if isinstance(answer, Observation):
                turn = self._turn(answer.content, to=rollout.turns[-1])
                return replace(turn, reward=float(answer.reward))
            if isinstance(answer, str | list | tuple):
                return self._turn(answer, to=rollout.turns[-1])
        except Exception as error:  # noqa: BLE001 - the reason is kept: broken, not wrong
            below = error.__traceback__ and error.__traceback__.tb_next  # a user wants their own
            self.scores[number] = raised(self._judge, error.with_traceback(below))
            return None
        if answer is not None:
            score, earned = checked(self._judge, answer), sum(turn.reward for turn in rollout.turns)
            self.scores[number] = replace(score, value=score.value + earned) if earned else score
        return None

    def _turn(self, answer: Any, *, to: Turn) -> Turn:
        if not answer:
            raise ValueError("an empty reply; return None, or a score, to end the rollout")
        if isinstance(answer, str):
            return Turn(tokens=tuple(self._encode(answer, to)), text=answer)
        if all(isinstance(each, int) for each in answer):
            return Turn(tokens=tuple(answer), text="")
        text = "\n".join(message["content"] for message in answer)
        return Turn(tokens=tuple(self._encode(answer, to)), text=text)


def talking(env: Env | None, encode: Encode | None) -> Conversations | None:
    """What replies in one call of an engine: a new conversation for each sequence, or nothing."""
    return None if env is None else Conversations(env, encode=encode or _no_tokens)


def _no_tokens(said: object, turn: Turn) -> Sequence[int]:
    raise ValueError("no tokenizer for an environment that says text; give collect_scored encode=")


def over(graded: Score, given: Score) -> Score:
    """The score that an environment has ``given``; what the rewards said is kept in its parts.

    >>> score = over(Score(value=0.0, parts={"exact": 0.0}), Score(value=0.5))
    >>> score.value, score.parts
    (0.5, {'exact': 0.0, 'env': 0.5})
    """
    parts = {f"env/{name}": value for name, value in given.parts.items()}
    parts |= {"env": given.value} if given.ok else {}
    return replace(given, parts={**graded.parts, **parts}, seconds=graded.seconds)
