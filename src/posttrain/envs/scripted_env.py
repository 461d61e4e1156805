"""An environment with fixed replies: for tests, and to see what turns look like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain.protocols import Answer
from posttrain.types import Prompt, Turn


class ScriptedEnv:
    """Answers the first turn with the first of ``replies``, and so on; then the rollout is over.

    It ends with ``score``; without one, the rewards score it.

    >>> env = ScriptedEnv(replies=["and in words?"], score=1.0)
    >>> state, turn = env.start(Prompt(id="0", text="2+3=")), Turn(tokens=(5,), text="5")
    >>> env.reply(state, turn), env.reply(state, turn)
    ('and in words?', 1.0)
    """

    def __init__(self, *, replies: Sequence[Answer] = (), score: float | None = None) -> None:
        self._replies = tuple(replies)
        self._score = score

    def start(self, prompt: Prompt) -> Iterator[Answer]:
        """The state of a rollout: the replies that are left."""
        return iter(self._replies)

    def reply(self, state: Iterator[Answer], turn: Turn) -> Answer:
        """The next reply, or the end."""
        return next(state, self._score)
