"""A plain function as an environment: it is asked with the conversation, and answers or ends it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.envs.tool_turns import finished, heard, is_async, make_plain
from posttrain.types import Prompt, Turn


@dataclass
class Conversation:
    """What was said so far, and what the function may know beside it."""

    messages: list[Mapping[str, Any]]
    known: dict[str, Any]


class FunctionEnv:
    """Asks ``function(messages)`` after every turn of the policy.

    ``messages`` are the prompt's, and those of the assistant and the user since. It returns a
    text, messages or an ``Observation`` to go on, or a number, a ``Score`` or None to end.
    Without a ``chat`` text is read as it stands, so a line break belongs to it. Further positional
    parameters are columns of the prompt by name, or ``prompt`` or ``seed``.

    >>> def count(messages, answer):
    ...     return 1.0 if messages[-1]["content"] == answer else "again"
    >>> env = from_function(count)
    >>> state = env.start(Prompt(id="0", text="2+3=", columns={"answer": "5"}))
    >>> [env.reply(state, Turn(tokens=(), text=text)) for text in ("4", "5")]
    ['again', 1.0]
    """

    def __init__(self, function: Callable[..., Any], *, chat: bool = False) -> None:
        self._function = function
        self._chat = chat
        given = positional(function)
        self._wanted = given[1:]
        if not given or given[0].name != "messages":
            inside = getattr(function, "func", function)  # of a partial
            raise ValueError(
                f"environment {getattr(inside, '__name__', inside)!r}: the first parameter of a "
                "function is called messages, the conversation so far; columns of the prompt come "
                "behind it"
            )

    def start(self, prompt: Prompt, *, seed: int = 0) -> Conversation:
        """The messages of the prompt."""
        columns = {"prompt": prompt.text, "seed": seed, **prompt.columns}
        missing = [
            each.name
            for each in self._wanted
            if each.name not in columns and each.default is each.empty
        ]
        if missing:
            raise ValueError(
                f"the environment's function asks for {missing[0]!r}, which prompt {prompt.id!r} "
                f"does not have; its columns: {', '.join(prompt.columns) or 'none'}"
            )
        known = {each.name: columns[each.name] for each in self._wanted if each.name in columns}
        begun = prompt.messages or ({"role": "user", "content": prompt.text},)
        return Conversation(messages=list(begun), known=known)

    async def reply(self, state: Conversation, turn: Turn) -> Any:
        """What the function returns, as the policy reads it."""
        state.messages.append({"role": "assistant", "content": turn.text})
        answer = await finished(self._function(list(state.messages), **state.known))
        return heard(state.messages, answer, chat=self._chat)


def from_function(function: Callable[..., Any], **options: Any) -> Any:
    """The environment of a function or coroutine: :class:`FunctionEnv`."""
    env = FunctionEnv(function, **options)
    if not is_async([function]):
        make_plain(env, "reply")
    return env


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters of a function."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [each for each in found if each.kind in kinds]
