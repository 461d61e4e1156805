"""Rows from JSONL files: every error names the file and the line, and says how to mend it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.data.tool_formats import uses_tools, with_ids
from posttrain.registry import nearest

MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 8 * 2**30
_OTHERS = {
    b"\x1f\x8b": ("a gzip archive", "unpack it with gunzip"),
    b"BZh": ("a bzip2 archive", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("an xz archive", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "unpack it with unzstd"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"PAR1": ("a Parquet file", "write its rows as JSON objects, one per line"),
    b"\xff\xfe": ("UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
}
MEND = "mend or remove the line"
ROLES = ("system", "user", "assistant", "tool")


def read_numbered(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with the number of its line, for errors about it."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file}: is a folder; give the path of a JSONL file in it")
    if not file.is_file():
        folder = file.resolve().parent
        near = nearest(file.name, [each.name for each in folder.glob("*") if each.is_file()])
        hint = f"; did you mean {near!r}?" if near else ""
        raise FileNotFoundError(f"{file}: there is no such file (looked in {folder}){hint}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(
            f"{file}: {file.stat().st_size / 2**30:.1f} GiB is read whole into memory and is more "
            f"than {MAX_FILE_BYTES // 2**30} GiB; split the file"
        )
    rows = [(number, _parse(line, f"{file}:{number}")) for number, line in _lines(file)]
    if not rows:
        raise ValueError(f"{file}: holds no rows; write one JSON object per line")
    return rows


def read_demonstrations(path: str | Path) -> list[dict[str, Any]]:
    """Demonstrations for SFT: rows with ``prompt`` and ``completion``, or with ``messages``.

    Neither may be empty, and a chat ends with what the assistant should say. Rows that occur
    twice are kept, because that can be meant, and reported in a warning.
    """
    rows = read_numbered(path)
    seen: set[str] = set()
    repeated: list[int] = []
    for number, row in rows:
        where = f"{path}:{number}"
        if "messages" in row:
            check_messages(row["messages"], where=where, calls=True)
            if uses_tools(row["messages"]):
                row["messages"] = with_ids(row["messages"], where=where)
            if row["messages"][-1]["role"] != "assistant":
                raise ValueError(
                    f"{where}: the last message is the {row['messages'][-1]['role']}'s; a "
                    "demonstration ends with what the assistant should say"
                )
            identity = json.dumps(row["messages"], sort_keys=True)
        else:
            check_text(row, "prompt", where=where)
            check_text(row, "completion", where=where)
            identity = json.dumps([row["prompt"], row["completion"]])
        if identity in seen:
            repeated.append(number)
        seen.add(identity)
    if repeated:
        warnings.warn(
            f"{path}: {len(repeated)} of {len(rows)} demonstrations repeat an earlier one "
            f"(the first in line {repeated[0]}) and are kept; remove them if that is not meant",
            stacklevel=2,
        )
    return [row for _, row in rows]


def check_text(row: Mapping[str, Any], column: str, *, where: str) -> str:
    """The text in a column of a row; a ``ValueError`` where it is missing, no text or empty."""
    if column not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{where}: no column {column!r} (the row has {known}); add it or rename")
    value = row[column]
    if not isinstance(value, str):
        plain = isinstance(value, int | float)  # true and false too: bool is a subclass of int
        mend = "put it in quotes" if plain else "write text in its place, or remove the line"
        raise ValueError(f"{where}: {column!r} must be text, got {_short(value)}; {mend}")
    if not value.strip():
        raise ValueError(f"{where}: {column!r} is empty; fill it in or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f"{where}: {column!r} has half of a character (a lone surrogate, like \\ud800), which "
            "no tokenizer can read; mend or remove the line"
        )
    return value


def check_messages(messages: Any, *, where: str, calls: bool = False) -> tuple[dict[str, str], ...]:
    """A chat as role and content pairs; a ``ValueError`` where a message is not one.

    With ``calls`` a message that calls tools may say nothing beside.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: 'messages' must be a list of at least one "
            f'{{"role": …, "content": …}}, got {_short(messages)}'
        )
    checked = []
    for index, message in enumerate(messages):
        place = f"{where}: message {index + 1}"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: expected role and content, got {_short(message)}")
        if message.get("role") not in ROLES:
            role = _short(message.get("role"))
            raise ValueError(f"{place}: the role must be one of {', '.join(ROLES)}, got {role}")
        calls_alone = calls and message.get("tool_calls") and not message.get("content")
        content = "" if calls_alone else check_text(message, "content", where=place)
        checked.append({"role": message["role"], "content": content})
    return tuple(checked)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank. Split at newlines alone: U+2028 may stand inside a string."""
    with file.open("rb") as opened:
        _check_begins(opened.read(8), file)
        opened.seek(0)
        read = iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(read, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{file}:{number}: a line of more than {MAX_LINE_BYTES / 2**20:.0f} MiB; is "
                    "this one JSON array? Write one object per line"
                )
            if b"\0" in line:
                raise ValueError(
                    f"{file}:{number}: NUL bytes, which JSON has none of: the file is damaged, or "
                    "UTF-16; copy it again, or convert it with iconv -f UTF-16 -t UTF-8"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}:{number}: not UTF-8 ({error.reason} at byte {error.start}); convert "
                    "the file, for example with iconv -t UTF-8"
                ) from error
            if text.strip():
                yield number, text


def _check_begins(begins: bytes, file: Path) -> None:
    """Raise where the first bytes are those of another kind of file."""
    for magic, (what, mend) in _OTHERS.items():
        if begins.startswith(magic):
            raise ValueError(f"{file}: is {what}, not JSONL; {mend}")


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        array = "is this one JSON array? Write one object per line" if text[0] == "[" else MEND
        raise ValueError(
            f"{where}: not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno}); "
            f"{array}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); {MEND}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object like {{…}}, got {_short(row)}")
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice; keep one")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or a number")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
