"""Environments of Gymnasium (https://gymnasium.farama.org) that can be read and played as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.envs.adapters import need
from posttrain.protocols import Answer
from posttrain.types import Observation, Prompt, Turn

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST = 2**31  # a seed is smaller


@dataclass
class GymnasiumGame:
    """One episode: its environment, and what it showed at first."""

    env: Any
    opening: str
    turns: int = 0


class GymnasiumText:
    """``gymnasium.make(environment, **settings)``, where observations and actions are text.

    They are shown as the environment renders itself ("ansi"), where it can, and else as they are.
    Of discrete actions the policy writes the name, one of ``actions`` in their order, without which
    it is a number: the last one in its turn counts, and a turn without one is told so. Each step's
    reward is that of the turn; ``max_turns`` ends an episode that the environment does not. The
    seed of ``reset`` is the rollout's own.
    Needs gymnasium: ``pip install 'posttrain[gymnasium]'``.
    """

    def __init__(
        self,
        *,
        environment: str,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        max_turns: int = 0,
        chat: bool = False,
    ) -> None:
        gymnasium = need("gymnasium")
        self._id, self._settings = environment, dict(settings or {})
        self._max_turns, self._chat = max_turns, chat
        modes = gymnasium.spec(environment).make(**self._settings).metadata["render_modes"]
        self._settings |= {"render_mode": "ansi"} if "ansi" in modes else {}
        env = self._make()
        space = env.action_space
        env.close()
        self._names: list[str] | None = None
        if isinstance(space, gymnasium.spaces.Discrete):
            first, count = int(space.start), int(space.n)
            self._names = list(actions) or [str(first + n) for n in range(count)]
            if len(self._names) != count:
                raise ValueError(f"gymnasium {environment!r}: {count} actions, got {len(actions)}")
            self._first = first
        elif not isinstance(space, gymnasium.spaces.Text):
            raise ValueError(
                f"gymnasium {environment!r}: its actions are {space}; a policy writes text: use "
                "one with discrete actions or text"
            )

    def start(self, prompt: Prompt, *, seed: int | None = None) -> GymnasiumGame:
        """A new game, reset with the seed."""
        env = self._make()
        observation, _ = env.reset(seed=None if seed is None else seed % _MOST)
        return GymnasiumGame(env, f"\n{self._shown(env, observation)}\n")

    def opening(self, state: GymnasiumGame) -> str:
        """What the environment shows before the first turn."""
        return state.opening

    def reply(self, state: GymnasiumGame, turn: Turn) -> Answer:
        """What the environment shows now, with the reward of the turn; or the end."""
        state.turns += 1
        late = state.turns == self._max_turns
        action = self._action(turn.text)
        if action is None:
            text, reward, over = f"one of: {', '.join(self._names or ())}", 0.0, False
        else:
            observation, given, terminated, truncated, _ = state.env.step(action)
            reward, over = float(given), bool(terminated or truncated)
            text = self._shown(state.env, observation)
        if over or late:
            return reward
        return Observation(text if self._chat else f"\n{text}\n", reward=reward)

    def close(self, state: GymnasiumGame) -> None:
        """Let the environment give back what it holds."""
        state.env.close()

    def _make(self) -> Any:
        return need("gymnasium").make(self._id, **self._settings)

    def _action(self, text: str) -> Any:
        if self._names is None:
            return text
        words = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, flags=re.IGNORECASE)
        if not found:
            return None
        return self._first + [name.casefold() for name in self._names].index(found[-1].casefold())

    def _shown(self, env: Any, observation: Any) -> str:
        drawn = env.render() if self._settings.get("render_mode") == "ansi" else None
        if drawn is None:
            return str(observation)
        return _marked(drawn).strip("\n")


def _marked(drawn: str) -> str:
    """A drawing without colours: what stood in one stands in brackets.

    >>> _marked("S\\x1b[41mF\\x1b[0mH")
    'S[F]H'
    """
    parts = _COLOUR.split(drawn)
    codes = _COLOUR.findall(drawn)
    texts = [parts[0]]
    for code, part in zip(codes, parts[1:], strict=True):
        texts.append(("]" if code in ("\x1b[0m", "\x1b[m") else "[") + part)
    return "".join(texts)
