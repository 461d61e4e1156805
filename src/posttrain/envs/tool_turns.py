"""A policy's turn that calls tools, answered: results, and errors that are the model's to mend."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.envs.tool_calls import FORMATS, Call, Malformed, Parsed
from posttrain.envs.tool_schemas import Schema, wrong_arguments
from posttrain.registry import did_you_mean, look_up
from posttrain.sandbox import SandboxError
from posttrain.types import Observation, Score

COUNTED = ("tool_calls", "tool_errors", "wrong_calls", "malformed_calls")

Invoke = Callable[[Call], Awaitable[Any]]
"""Calls a tool: what it returns; what it raises is told to the model."""
THREADS: ContextVar[Callable[..., Future[Any]] | None] = ContextVar("threads", default=None)
"""Runs a function in a thread, for coroutines in a loop that nothing may hold up."""


class ToolTurns:
    """Finds the calls in a turn in the model's format, and answers them by tools with schemas.

    A call that cannot be read, of an unknown tool, or with wrong arguments is answered by what is
    wrong with it, and so is one whose tool raised: with the text of the exception, as TRL does. In
    a ``chat`` the answers are messages with the role "tool", otherwise text.

    >>> turns = ToolTurns([], tool_format="json_tags", chat=False)
    >>> turns.find('<tool>{"name": "add"}</tool>')
    [Call(name='add', arguments={}, id='')]
    """

    def __init__(self, schemas: Sequence[Schema], *, tool_format: str, chat: bool) -> None:
        look_up(tool_format, FORMATS, kind="tool_format")  # type: ignore[arg-type]
        self._schemas = {schema["function"]["name"]: schema for schema in schemas}
        self._format = FORMATS[tool_format]
        self._chat = chat

    def find(self, text: str) -> Parsed:
        """The calls in a turn, with those that are malformed."""
        return self._format.parse(text)

    async def answer(
        self, calls: Parsed, invoke: Invoke, *, counts: dict[str, int]
    ) -> list[dict[str, str]]:
        """The message that answers each call; ``counts`` goes up by what happened."""
        return [await self._answer(call, invoke, counts=counts) for call in calls]

    async def _answer(
        self, call: Call | Malformed, invoke: Invoke, *, counts: dict[str, int]
    ) -> dict[str, str]:
        if isinstance(call, Malformed):
            counts["malformed_calls"] += 1
            return _message("unknown", _error(f"malformed call: {call.reason}"))
        counts["tool_calls"] += 1
        schema = self._schemas.get(call.name)
        if schema is None:
            wrong = f"unknown tool {call.name[:100]!r}; {did_you_mean(call.name, self._schemas)}"
        else:
            wrong = wrong_arguments(schema, call.arguments)
        if wrong:
            counts["wrong_calls"] += 1
            return _message(call.name[:100], _error(wrong), number=call.id)
        try:
            content = as_text(await invoke(call))
        except (SandboxError, MemoryError):  # the machine's fault, not the model's
            raise
        except Exception as error:  # noqa: BLE001 - the model is told, and it is counted
            counts["tool_errors"] += 1
            content = _error(str(error) or type(error).__name__)
        return _message(call.name, content, number=call.id)

    def said(self, messages: Sequence[Mapping[str, str]]) -> str | list[Mapping[str, str]]:
        """The answers as the policy reads them."""
        if self._chat:
            return list(messages)
        results = (f"<tool_result>{message['content']}</tool_result>" for message in messages)
        return "\n" + "\n".join(results) + "\n"


def _message(name: str, content: str, *, number: str = "") -> dict[str, str]:
    message = {"role": "tool", "name": name, "content": content}
    return {**message, "tool_call_id": number} if number else message


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


def as_text(result: Any) -> str:
    """What a tool returned, as text: texts as they are, objects and lists as JSON.

    >>> as_text(2.5), as_text({"a": [1]}), as_text([{"type": "text", "text": "hi"}])
    ('2.5', '{"a": [1]}', 'hi')
    """
    if isinstance(result, list) and result and all(_is_text_block(block) for block in result):
        return "\n".join(block["text"] for block in result)
    if isinstance(result, Observation | Score):
        raise TypeError("a tool returns what the model reads; the score is what reward() returns")
    if isinstance(result, dict | list | tuple):
        return json.dumps(result, ensure_ascii=False, default=str)
    return str(result)


def _is_text_block(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and "text" in block


def heard(messages: list[Mapping[str, Any]], said: Any, *, chat: bool) -> Any:
    """What goes on, added to the messages; as it is read: without a chat, as lines of text.

    >>> heard([], [{"role": "user", "content": "so?"}], chat=False)
    '\\nso?\\n'
    """
    if isinstance(said, Observation):
        return replace(said, content=heard(messages, said.content, chat=chat))
    if isinstance(said, str):
        messages.append({"role": "user", "content": said})
    elif isinstance(said, list | tuple) and said and isinstance(said[0], Mapping):
        messages += said
        return said if chat else "\n" + "\n".join(each["content"] for each in said) + "\n"
    return said


async def finished(result: Any) -> Any:
    """A result, awaited where it is of a coroutine."""
    return await result if inspect.isawaitable(result) else result


async def called(function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """What a function returns, or its coroutine; a function runs in a thread, where a loop has any.

    >>> run_now(called(max, 2, 3))
    3
    """
    submit = THREADS.get()
    if submit is None or inspect.iscoroutinefunction(function):
        return await finished(function(*given, **named))
    return await finished(await asyncio.wrap_future(submit(function, *given, **named)))


def run_now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that waits for nothing: a function called in the usual way."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError("a function that is no 'async def' returned something to wait for")


def make_plain(env: Any, *methods: str) -> None:
    """Make coroutines of an environment in which nothing waits plain methods, for a thread."""
    for name in methods:
        setattr(env, name, partial(_now, getattr(env, name)))


def _now(waits: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    return run_now(waits(*given, **named))


def is_async(functions: Sequence[Callable[..., Any] | Awaitable[Any] | None]) -> bool:
    """Whether any of the functions is a coroutine's."""
    return any(inspect.iscoroutinefunction(function) for function in functions)
