"""A class as an environment: ``reset``, public methods as tools, and a reward.

It is the shape of TRL's ``environment_factory``, so that such classes move over unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from posttrain.envs.tool_calls import Call
from posttrain.envs.tool_schemas import tool_schema
from posttrain.envs.tool_turns import COUNTED, ToolTurns, called, heard, is_async, make_plain
from posttrain.protocols import Answer
from posttrain.types import Prompt, Score, Turn, with_opening

NOT_TOOLS = {"reset", "get_reward", "reward", "on_text", "close"}


@dataclass
class Played:
    """One episode: the instance of the class, and what was said."""

    instance: Any
    prompt: Prompt
    opening: str = ""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))


class ClassEnv:
    """Plays episodes with instances of a class ``kind``, one for each, made by ``factory``.

    * ``reset(**columns)`` gets the prompt's columns, and the prompt as ``prompt``; without
      ``**`` those that it names, a ``seed`` too. A text that it returns is read behind the prompt.
    * Public methods with type hints and docstrings are tools. A reply without a call ends the
      episode, unless a method ``on_text(text)`` returns an answer that goes on; and so does the
      attribute ``until``, once it is true.
    * ``get_reward()`` or ``reward()`` is the score, with what the functions ``rewards`` return: TRL
      calls those with lists, of one episode here, and its ``environments``. A class without either
      whose instances have a number ``reward`` is scored by that; otherwise the recipe's rewards do.
    * ``close()`` is called at the end.

    An exception of a tool is told to the model; one of ``reset`` or of a reward is the
    environment's, and makes the rollout invalid. All of the methods may be coroutines.

    >>> class Counter:
    ...     def reset(self, **columns): self.count = 0
    ...     def reward(self): return self.count
    ...     def add(self, n: int) -> int:
    ...         '''Add to the count.
    ...
    ...         Args:
    ...             n: How much.
    ...         '''
    ...         self.count += n
    ...         return self.count
    >>> env = from_class(Counter)
    >>> state = env.start(Prompt(id="0", text="Count!"))
    >>> call = '<tool>{"name": "add", "arguments": {"n": 2}}</tool>'
    >>> env.reply(state, Turn(tokens=(), text=call)), env.reply(state, Turn(tokens=(), text="Done"))
    ('\\n<tool_result>2</tool_result>\\n', 2)
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        kind: type,
        *,
        rewards: Sequence[Callable[..., Any]] = (),
        until: str = "",
        tool_format: str = "json_tags",
        chat: bool = False,
    ) -> None:
        names = tool_names(kind)
        if not callable(getattr(kind, "reset", None)):
            raise ValueError(f"environment {kind.__name__}: it has no method reset")
        if not names and not hasattr(kind, "on_text"):
            raise ValueError(
                f"environment {kind.__name__}: it has no public methods, so there is no tool"
            )
        self.tools = tuple(tool_schema(getattr(kind, name)) for name in names)
        self.scores = bool(rewards) or getattr(kind, "scores", True) is not False
        self._factory, self._name = factory, kind.__name__
        self._columns = _required(kind)
        self._rewards = tuple(rewards)
        self._until = until
        self._turns = ToolTurns(self.tools, tool_format=tool_format, chat=chat)
        self._chat = chat

    def check_columns(self, prompt: Prompt) -> None:
        """Raise a ``ValueError`` where ``reset`` wants a column that the prompt does not have."""
        if missing := [name for name in self._columns if name not in prompt.columns]:
            raise ValueError(
                f"environment {self._name}: reset wants {' and '.join(map(repr, missing))}, which "
                f"prompt {prompt.id!r} does not have; add the columns to its row (a prompt that "
                "is typed has none: play a recipe or a run, or name a task), or give defaults"
            )

    def opening(self, state: Played) -> str:
        """What ``reset`` has returned."""
        return state.opening

    def counts(self, state: Played) -> dict[str, int]:
        """How many calls there were, and what became of them."""
        return dict(state.counts)

    async def start(self, prompt: Prompt, *, seed: int = 0) -> Any:
        """A new instance, reset."""
        state = Played(instance=self._factory(), prompt=prompt)
        reset = state.instance.reset
        row = {"prompt": list(prompt.messages) or prompt.text, **prompt.columns}
        parameters = inspect.signature(reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        if "seed" in parameters:
            row.setdefault("seed", seed)
        opening = await called(reset, **row)
        if opening is not None and not isinstance(opening, str):
            raise TypeError(f"reset: expected a text or None, got {type(opening).__name__}")
        state.opening = opening or ""
        return state

    async def reply(self, state: Played, turn: Turn) -> Any:
        """The results of the calls in a turn; the end, where there are none."""
        calls = self._turns.find(turn.text)
        state.tokens += turn.tokens
        state.messages.append(_assistant(turn.text, [c for c in calls if isinstance(c, Call)]))
        if not calls:
            return await self._without_call(state, turn.text)

        async def invoke(call: Call) -> Any:
            return await called(getattr(state.instance, call.name), **call.arguments)

        answers = await self._turns.answer(calls, invoke, counts=state.counts)
        state.messages += answers
        if self._until and getattr(state.instance, self._until):
            return await self._score(state)
        return self._turns.said(answers)

    async def _without_call(self, state: Played, text: str) -> Answer:
        asked = getattr(state.instance, "on_text", None)
        answer = None if asked is None else await called(asked, text)
        if answer is None or (self._until and getattr(state.instance, self._until)):
            return await self._score(state)
        return heard(state.messages, answer, chat=self._chat)

    async def score(self, state: Played) -> Any:
        """What the episode is worth as it stands."""
        return await self._score(state)

    async def _score(self, state: Played) -> float | Score | None:
        instance = state.instance
        own = getattr(instance, "get_reward", None) or getattr(instance, "reward", None)
        given = await called(own) if callable(own) else None
        if not self._rewards:
            number = isinstance(own, Real) or hasattr(own, "item")  # of numpy or torch
            return own if number else given
        parts = {} if given is None else {type(instance).__name__: given}
        for function in self._rewards:
            value = await self._rewarded(function, state)
            if value is not None:  # TRL leaves such a reward out of the sum
                parts[getattr(function, "__name__", "reward")] = value
        numbers = {name: getattr(part, "value", part) for name, part in parts.items()}
        return Score(value=float(sum(numbers.values())), parts=numbers)

    async def _rewarded(self, function: Callable[..., Any], state: Played) -> Any:
        """What a reward function of TRL's signature says of one episode."""
        prompt, chat = with_opening(state.prompt, state.opening), self._chat
        completion = state.messages if chat else "".join(m["content"] for m in state.messages)
        given = {
            **{name: [value] for name, value in prompt.columns.items()},
            "prompts": [list(prompt.messages) or prompt.text],
            "completions": [completion],
            "completion_ids": [state.tokens],
            "environments": [state.instance],
            "trainer_state": None,
            "log_extra": _unheard,
            "log_metric": _unheard,
        }
        parameters = inspect.signature(function).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        values = list(await called(function, **given))
        if len(values) != 1:
            raise ValueError(
                f"reward function {function.__name__!r}: expected a list of one reward, for one "
                f"episode, got {len(values)}"
            )
        return values[0]

    async def close(self, state: Played) -> Any:
        """Let the instance give back what it holds."""
        close = getattr(state.instance, "close", None)
        if callable(close):
            await called(close)


def _required(kind: type) -> list[str]:
    """The columns that ``reset`` has no defaults for."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = list(inspect.signature(kind.reset).parameters.values())  # type: ignore[attr-defined]
    own = own[1:] if inspect.isfunction(inspect.getattr_static(kind, "reset")) else own
    asked = [each.name for each in own if each.kind in named and each.default is each.empty]
    return [name for name in asked if name not in ("prompt", "seed")]


def from_class(factory: Callable[[], Any], kind: type | None = None, **options: Any) -> Any:
    """The environment of a class, or of a function that makes instances of the class ``kind``."""
    made = factory if isinstance(factory, type) else kind or type(factory())
    methods = [getattr(made, name, None) for name in (*tool_names(made), *NOT_TOOLS)]
    env = ClassEnv(factory, made, **options)
    if not is_async([*methods, *options.get("rewards", ())]):
        make_plain(env, "start", "reply", "score", "close")
    return env


def tool_names(kind: type) -> list[str]:
    """The methods of a class that are tools: all public ones but those that have a meaning."""
    found = [
        *inspect.getmembers(kind, inspect.isfunction),
        *inspect.getmembers(kind, inspect.ismethod),
    ]
    return [name for name, _ in found if name not in NOT_TOOLS and not name.startswith("_")]


def _assistant(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _unheard(*given: Any) -> None:
    """TRL's way for a reward function to log: nobody listens here."""
