"""How a model's chat template writes tools, or how they are told to a model in plain text."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.data.chats import ChatRefused

Message = Mapping[str, Any]
PLAIN = "json_tags"  # the format for a model whose template knows no tools, or writes unknown calls
CALL = "look_up"
SAMPLE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": CALL,
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
# What a call looks like in each format; the names are those of the parsers of environments.
WRITTEN = {
    "hermes": rf'<tool_call>\s*\{{"name": "{CALL}", "arguments": ',
    "llama": rf'\{{"name": "{CALL}", "parameters": ',
    "mistral": rf'\[TOOL_CALLS\]\s*\[\{{"name": "{CALL}", "arguments": ',
}


def called(names: Sequence[str], *, arguments: Mapping[str, Any]) -> Message:
    """An assistant's message that calls functions; ids are nine letters and digits (Mistral)."""
    calls = [
        {"id": call_id(n), "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def call_id(number: int) -> str:
    """The id of a call whose own is not known.

    >>> call_id(1)
    'call00001'
    """
    return f"call{number:05d}"


def tool_format(write: Callable[[Sequence[Message]], str]) -> str:
    """The format in which ``write``, with :data:`SAMPLE` as its tools, writes an assistant's call.

    "json_tags" where it leaves the call out, refuses it, or writes it in a way of its own.
    """
    chat = [{"role": "user", "content": "a"}, called([CALL], arguments={"word": "b"})]
    try:
        text = write(chat)
    except ChatRefused:
        return PLAIN
    return next((name for name, call in WRITTEN.items() if re.search(call, text)), PLAIN)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model reads about tools that its template cannot write: calls have "json_tags"."""
    schemas = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You may call these functions, each given by its JSON schema:",
            *schemas,
            'To call one, write <tool>{"name": NAME, "arguments": {NAME: VALUE}}</tool>; what it '
            "returns follows between <tool_result> and </tool_result>.",
        ]
    )


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The chat with :func:`describe_tools` before its first message of the system or the user."""
    for place, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            told = {**message, "content": f"{describe_tools(tools)}\n\n{message['content']}"}
            return [*messages[:place], told, *messages[place + 1 :]]
    return [{"role": "user", "content": describe_tools(tools)}, *messages]


def as_user(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user and of tools as one of the user: for a template that knows no other."""
    merged: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_result>{content}</tool_result>"
        if merged and merged[-1]["role"] == role:
            merged[-1] = {"role": role, "content": f"{merged[-1]['content']}\n{content}"}
        else:
            merged.append({"role": role, "content": content})
    return merged


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a chat has calls of tools, or what they returned."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def in_plain(messages: Sequence[Message]) -> list[Message]:
    """A chat with tools for a template that knows none, as an episode writes it: "json_tags".

    >>> asks = called(["add"], arguments={"a": 1})
    >>> [m["content"] for m in in_plain([asks, {"role": "tool", "content": "2"}])]
    ['<tool>{"name": "add", "arguments": {"a": 1}}</tool>', '<tool_result>2</tool_result>']
    """
    plain: list[Message] = []
    for own, run in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        turn = list(run)
        if not own:
            plain += as_user(turn) if uses_tools(turn) else turn
            continue
        for message in turn:
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            kept = ({key: each[key] for key in ("name", "arguments")} for each in functions)
            calls = [f"<tool>{json.dumps(each, ensure_ascii=False)}</tool>" for each in kept]
            text = "\n".join([*filter(None, [message["content"]]), *calls])
            plain.append({"role": "assistant", "content": text})
    return plain


def with_ids(messages: Sequence[Message], *, where: str) -> list[Message]:
    """A chat whose calls have objects as arguments, and ids that results refer to, in order.

    A ``ValueError`` where something is no call.
    """
    told: list[Message] = []
    open_calls: list[str] = []
    number = itertools.count()
    for place, message in enumerate(messages, start=1):
        new = dict(message)
        if message.get("tool_calls"):
            what = f"{where}: message {place}: tool_calls"
            new["tool_calls"] = [
                _checked(call, number=next(number), where=what) for call in message["tool_calls"]
            ]
            new["content"] = message.get("content") or ""
            open_calls = [call["id"] for call in new["tool_calls"]]
        elif message["role"] == "tool" and open_calls:
            new.setdefault("tool_call_id", open_calls.pop(0))
        told.append(new)
    return told


def _checked(call: Any, *, number: int, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(call, dict) and "function" not in call and "arguments" in call:
        function = call  # some leave out the table "function" around name and arguments
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    with contextlib.suppress(json.JSONDecodeError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(
            f'{where}: expected {{"function": {{"name": …, "arguments": {{…}}}}}}, got {call!r}'
        )
    given = {"name": name, "arguments": arguments}
    return {"id": str(call.get("id") or call_id(number)), "type": "function", "function": given}
