"""Rows of files as they are, and demonstrations for SFT."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from typing import Any

from posttrain.data.conventions import read_as
from posttrain.data.row_checks import check_messages, check_text
from posttrain.data.row_files import open_table
from posttrain.data.tool_formats import uses_tools, with_ids


def read_numbered(path: Any) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a file as they stand, each with its number or line, for errors about it."""
    table = open_table(path)
    rows = list(table.rows)
    if not rows:
        raise ValueError(f"{table.name}: holds no rows; give at least one")
    return rows


def read_demonstrations(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    name: str = "sft.data",
) -> list[dict[str, Any]]:
    """Demonstrations for SFT: rows of ``prompt`` and ``completion``, of ``messages``, or ``text``.

    None may be empty, and a chat ends with what the assistant should say. Rows that occur
    twice are kept, because that can be meant, and reported in a warning. No more than ``limit``
    are read.
    """
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    repeated: list[str] = []
    read = read_as("demonstrations", source, columns=columns, name=name)
    for _, where, row in itertools.islice(read, limit):
        kept = _demonstration(row, where=where)
        identity = json.dumps(kept, sort_keys=True)
        if identity in seen:
            repeated.append(where)
        seen.add(identity)
        rows.append(kept)
    if repeated:
        warnings.warn(
            f"{len(repeated)} of {len(rows)} demonstrations repeat an earlier one (the first is "
            f"{repeated[0]}) and are kept; remove them if that is not meant",
            stacklevel=2,
        )
    return rows


def _demonstration(row: dict[str, Any], *, where: str) -> dict[str, Any]:
    """A row without the columns that nothing is learned from."""
    if "messages" not in row:
        if "text" in row and "prompt" not in row and "completion" not in row:
            return {"text": check_text(row, "text", where=where)}
        return {column: check_text(row, column, where=where) for column in ("prompt", "completion")}
    messages = row["messages"]
    check_messages(messages, where=where, calls=True)
    if uses_tools(messages):
        messages = with_ids(messages, where=where)
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{where}: the last message is the {messages[-1]['role']}'s; a demonstration ends with "
            "what the assistant should say"
        )
    return {"messages": messages}
