"""What every row is checked for: text that is text, and chats that are chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.data.row_files import shortly
from posttrain.registry import nearest

ROLES = ("system", "user", "assistant", "tool")
MEANT = {"prompt", "completion", "chosen", "rejected", "messages"}  # what they are called


def mapping(ours: str, theirs: str) -> str:
    """How a column that is called otherwise is named, in a recipe and from Python.

    >>> mapping("prompt", "text")
    "columns = { prompt = 'text' } (Python: columns={'prompt': 'text'})"
    """
    return f"columns = {{ {ours} = {theirs!r:.60} }} (Python: columns={{{ours!r}: {theirs!r:.60}}})"


def check_text(row: Mapping[str, Any], column: str, *, where: str, mapped: bool = True) -> str:
    """The text in a column of a row; a ``ValueError`` where it is missing, no text or empty."""
    if column not in row:
        known = ", ".join(map(repr, row)) or "none"
        others = [name for name in row if name not in MEANT]
        near = nearest(column, others) or next(iter(others), "")
        fix = "add it"
        if near:
            fix += f", or name the one that is meant: {mapping(column, near)}"
        raise ValueError(
            f"{where}: no column {column!r} (the row has {known}); "
            + (fix if mapped else "add it or rename one")
        )
    value = row[column]
    if not isinstance(value, str):
        plain = isinstance(value, int | float)  # true and false too: bool is a subclass of int
        mend = "put it in quotes" if plain else "write text in its place, or remove the line"
        raise ValueError(f"{where}: {column!r} must be text, got {shortly(value)}; {mend}")
    if not value.strip():
        raise ValueError(f"{where}: {column!r} is empty; fill it in or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f"{where}: {column!r} has half of a character (a lone surrogate, like \\ud800), which "
            "no tokenizer can read; fix or remove the line"
        )
    return value


def check_messages(messages: Any, *, where: str, calls: bool = False) -> tuple[dict[str, str], ...]:
    """A chat as role and content pairs; a ``ValueError`` where a message is not one.

    With ``calls`` a message that calls tools may say nothing beside, and a tool nothing at all.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: 'messages' must be a list of at least one "
            f'{{"role": …, "content": …}}, got {shortly(messages)}'
        )
    checked = []
    for index, message in enumerate(messages):
        place = f"{where}: message {index + 1}"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: expected role and content, got {shortly(message)}")
        if message.get("role") not in ROLES:
            role = shortly(message.get("role"))
            raise ValueError(f"{place}: the role must be one of {', '.join(ROLES)}, got {role}")
        silent = calls and (message.get("tool_calls") or message["role"] == "tool")
        silent = silent and message.get("content") in (None, "")
        content = "" if silent else check_text(message, "content", where=place, mapped=False)
        checked.append({"role": message["role"], "content": content})
    return tuple(checked)
