"""How a model's chat template writes tools, or how they are told to a model in plain text."""

from __future__ import annotations

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
