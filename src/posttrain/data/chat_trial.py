"""Whether a chat template writes every message of a chat, tried on contents that can be found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.data.chats import Chat, ChatRefused

SHOWN = 300  # characters of what a template wrote, in an error


def try_template(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[Chat]], list[str]],
    *,
    file: str,
) -> None:
    """Refuse a chat template that leaves out a message of such a chat, and say what it wrote.

    A template that writes other roles like the user's gets a warning.
    """
    roles = [message["role"] for message in messages]
    contents = [f"message {number} of {len(roles)}." for number in range(1, len(roles) + 1)]
    chat = [{**m, "content": text} for m, text in zip(messages, contents, strict=True)]
    reply = roles[-1] != "assistant"
    [text] = write([(chat, reply)])
    missing = [message for message in chat if message["content"] not in text]
    # Some templates write the calls of a message alone.
    left_out = [message["role"] for message in missing if not message.get("tool_calls")]
    if left_out:
        system = "remove the system message (model.system, or from the data), or "
        raise ValueError(
            f"chat: the chat template ({file}) leaves out the {left_out[0]}'s message: "
            f"of a chat of {', '.join(roles)} it writes {text[:SHOWN]!r}; "
            f"{system if left_out[0] == 'system' else ''}mend the template, or set "
            "chat = false and write plain prompts"
        )
    for role in sorted({*roles} - {"user"}):
        others = [_as_users(m) if m["role"] == role else m for m in chat]
        try:
            [same] = write([(others, reply)])
        except ChatRefused:
            continue  # the template refuses the other role, so it tells them apart
        if same == text:
            warnings.warn(
                f"chat: the chat template ({file}) writes the {role}'s messages like "
                f"the user's, so that the model cannot tell them apart: {text[:SHOWN]!r}; "
                "mend the template, unless that is meant",
                stacklevel=3,
            )


def _as_users(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the user's, who neither calls tools nor answers for them."""
    tools = ("tool_calls", "tool_call_id", "name")
    return {**{key: value for key, value in message.items() if key not in tools}, "role": "user"}
