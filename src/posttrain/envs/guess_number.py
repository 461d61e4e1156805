"""Guess a number: the environment says "higher" or "lower" until the guess is right."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from posttrain.protocols import Answer
from posttrain.types import Observation, Prompt, Score, Turn

_NUMBER = re.compile(r"-?\d+", re.ASCII)
_MOST_DIGITS = 9


@dataclass
class Guessing:
    """One game: the number, the range it is in, and how many guesses there were."""

    low: int
    high: int
    secret: int
    guesses: int = 0

    @property
    def enough(self) -> int:
        """Guesses within which halving the range finds every number in it: ⌈log₂(n + 1)⌉.

        >>> [Guessing(low=1, high=n, secret=1).enough for n in (1, 7, 8, 100)]
        [1, 3, 4, 7]
        """
        return (self.high - self.low + 1).bit_length()


class GuessNumber:
    """Ends with 1 at the right guess, and with 0 after ``max_guesses`` wrong ones.

    The columns ``low``, ``high`` and ``secret`` of a prompt say which number it is; without them it
    is drawn by the seed from the options of that name. Without ``max_guesses`` there are as many as
    halving the range needs. Of what the policy says, the last number counts; text without one is
    asked again, and was a guess. Every wrong guess costs ``cost``.

    >>> env = GuessNumber(cost=0.1)
    >>> columns = {"low": 1, "high": 7, "secret": 6}
    >>> state = env.start(Prompt(id="0", text="1 to 7?", columns=columns))
    >>> [env.reply(state, Turn(tokens=(), text=guess)).reward for guess in ("4", "7")]
    [-0.1, -0.1]
    >>> env.reply(state, Turn(tokens=(), text="6")).parts
    {'found': 1.0, 'guesses': 3.0}
    """

    def __init__(
        self, *, low: int = 1, high: int = 100, max_guesses: int | None = None, cost: float = 0.0
    ) -> None:
        if low > high:
            raise ValueError(f"low: {low} is above high, {high}; exchange them")
        if max_guesses is not None and max_guesses < 1:
            raise ValueError(f"max_guesses: must be at least 1, got {max_guesses}")
        self._low, self._high = low, high
        self._max_guesses = max_guesses
        self._cost = cost

    def start(self, prompt: Prompt, *, seed: int | None = None) -> Guessing:
        """A new game: the number of the prompt, or one that the seed (or the prompt's id) draws."""
        given = {"low": self._low, "high": self._high, **prompt.columns}
        low, high = int(given["low"]), int(given["high"])
        drawn = random.Random(prompt.id if seed is None else seed).randint(low, high)
        secret = int(given.get("secret", drawn))
        if not low <= secret <= high:
            raise ValueError(f"prompt {prompt.id!r}: secret {secret} is not from {low} to {high}")
        return Guessing(low=low, high=high, secret=secret)

    def reply(self, state: Guessing, turn: Turn) -> Answer:
        """Whether the number is higher or lower than the policy's last one; or the end."""
        state.guesses += 1
        numbers = _NUMBER.findall(turn.text)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) <= _MOST_DIGITS else None
        found = guess == state.secret
        if found or state.guesses >= (self._max_guesses or state.enough):
            parts = {"found": float(found), "guesses": float(state.guesses)}
            return Score(value=float(found) - (0.0 if found else self._cost), parts=parts)
        if guess is None:
            text = f"a number from {state.low} to {state.high}"
        else:
            text = "higher" if state.secret > guess else "lower"
        return Observation(f"\n{text}\n", reward=-self._cost) if self._cost else f"\n{text}\n"
