"""An environment for runs: it asks once more, and rewards the first turn by what it was."""

from __future__ import annotations

import random
from typing import Any

from posttrain.types import Observation, Prompt, Turn


class AsksAgain:
    """Half a point for an even first token, then the first token of the second turn decides."""

    def start(self, prompt: Prompt) -> dict[str, int]:
        return {"turns": 0}

    def reply(self, state: dict[str, int], turn: Turn) -> Any:
        state["turns"] += 1
        if state["turns"] == 1:
            return Observation((5, 6), reward=0.5 * (turn.tokens[0] % 2 == 0))
        return float(turn.tokens[0] % 3 == 0)


class RepliesAtRandom:
    """What it says, and the score that it ends with, are never the same twice."""

    def start(self, prompt: Prompt) -> dict[str, int]:
        return {"turns": 0}

    def opening(self, state: dict[str, int]) -> str:
        return f"{random.SystemRandom().randrange(10)}+"

    def reply(self, state: dict[str, int], turn: Turn) -> Any:
        state["turns"] += 1
        drawn = random.SystemRandom()
        if state["turns"] == 1:
            content = "".join(drawn.choice("0123456789") for _ in range(8))
            return Observation(content, reward=drawn.random())
        return drawn.random()
