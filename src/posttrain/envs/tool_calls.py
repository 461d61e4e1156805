"""The calls of tools that a model has written, found in its text: by a table, never evaluated.

What a model may write is without limit, so every text gives a list: of calls, and of what was meant
as one and cannot be read, with the reason for the model to read. Time grows with the length alone.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_CHARACTERS = 200_000  # of a turn; what is longer holds no call that anyone meant
MAX_CALLS = 32  # of a turn
SHOWN = 200  # characters of a malformed call that are kept


@dataclass(frozen=True)
class Call:
    """A function to call, by name, with its arguments as JSON holds them; ``id`` where it has one.

    >>> Call("add", {"a": 1}).id
    ''
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Malformed:
    """What was meant as a call and is none, with the reason, for the model to read."""

    text: str
    reason: str


Parsed = list[Call | Malformed]


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls: ``write(name, arguments)`` is one of them."""

    find: Callable[[str], Parsed]
    write: Callable[[str, Mapping[str, Any]], str]

    def parse(self, text: str) -> Parsed:
        """The calls in a turn of a model, in order, with those that are malformed.

        A thought (``<think>…</think>``) holds no calls, and nor does one that is still open.

        >>> FORMATS["json_tags"].parse('So: <tool>{"name": "add", "arguments": {"a": 1}}</tool>')
        [Call(name='add', arguments={'a': 1}, id='')]
        >>> FORMATS["json_tags"].parse("<tool>add(1)</tool>")[0].reason
        'no JSON that can be read: Expecting value at character 0'
        """
        before, closed, after = text.partition("</think>")
        if not closed and before.lstrip().startswith("<think>"):
            return []
        said = after if closed else text
        if len(said) > MAX_CHARACTERS:
            return [_malformed(said, f"more than {MAX_CHARACTERS:,} characters")]
        found = self.find(said)
        if len(found) > MAX_CALLS:
            return [_malformed(said, f"more than {MAX_CALLS} calls in one turn")]
        return found


def _tagged(text: str, *, tags: tuple[str, str]) -> Parsed:
    """Each ``opening{json}closing``; the last needs no closing tag, where a stop string took it."""
    opening, closing = tags
    found: Parsed = []
    place = text.find(opening)
    while place >= 0 and len(found) <= MAX_CALLS:
        begin = place + len(opening)
        call, end = _read(text, begin, key=("arguments",))
        if isinstance(call, Call):
            end = _skip(text, end)
            if text.startswith(closing, end):
                end += len(closing)
            elif end < len(text):
                call = _malformed(text[place:end], f"no {closing} behind the JSON object")
        else:
            # JSON may hold the tags in a string, what is no JSON may not.
            stops = [n for tag in (closing, opening) if (n := text.find(tag, begin)) >= 0]
            end = min(stops, default=len(text))
            call = _malformed(text[begin:end], call.reason)
        found.append(call)
        place = text.find(opening, end)
    return found or _untagged(text, tags=tags)


_FENCED = re.compile(r"\s*```(?:json)?\s")


def _untagged(text: str, *, tags: tuple[str, str]) -> Parsed:
    """A turn that begins with an object of a name and arguments: a call whose tags were left out.

    Qwen2.5-Coder writes most of its calls so. Told of the tags it can write them.
    """
    fence = _FENCED.match(text)
    value, _ = _decoded(text, fence.end() if fence else 0)
    if not isinstance(value, dict) or not {"name", "arguments"} <= value.keys():
        return []
    return [_malformed(text, f"a call without its tags: write it as {tags[0]}{{…}}{tags[1]}")]


_PYTHON_TAG = "<|python_tag|>"
# A reply may be JSON without being a call: only one that begins like a call is meant as one.
_BEGINS = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')


def _llama(text: str) -> Parsed:
    """The whole turn, or what stands behind the python tag: objects, separated by semicolons."""
    _, tag, behind = text.partition(_PYTHON_TAG)
    if not tag and not _BEGINS.match(text):
        return []
    text, place = behind if tag else text, 0
    found: Parsed = []
    while len(found) <= MAX_CALLS:
        call, end = _read(text, place, key=("parameters", "arguments"))
        if isinstance(call, Malformed):
            return [*found, _malformed(text[place:], call.reason)]
        end = _skip(text, end)
        if end == len(text):
            return [*found, call]
        if text[end] != ";":
            return [*found, _malformed(text[place:], "text behind the call; write the call alone")]
        found.append(call)
        place = _skip(text, end + 1)
        if place == len(text):
            break
    return found


_TOOL_CALLS = "[TOOL_CALLS]"


def _mistral(text: str) -> Parsed:
    """An array of objects behind the tag, at the end of the turn."""
    _, tag, behind = text.partition(_TOOL_CALLS)
    if not tag:
        return []
    values, end = _decoded(behind)
    if isinstance(values, Malformed):
        return [values]
    if not isinstance(values, list) or not values:
        return [_malformed(behind, f"expected a JSON array of calls, got {_kind(values)}")]
    if behind[end:].strip():
        return [_malformed(behind, "text behind the calls; write them at the end")]
    return [_as_call(value, json.dumps(value), key=("arguments",)) for value in values]


def _read(text: str, begin: int, *, key: Sequence[str]) -> tuple[Call | Malformed, int]:
    """The call at a place of a text, and where it ends."""
    value, end = _decoded(text, begin)
    if isinstance(value, Malformed):
        return value, end
    return _as_call(value, text[begin:end], key=key), end


def _decoded(text: str, begin: int = 0) -> tuple[Any, int]:
    """The JSON at a place of a text, or why there is none, and where it ends."""
    begin = _skip(text, begin)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value, end
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos - begin}"
    except RecursionError:
        reason = "nested too deeply"
    except UnicodeEncodeError:
        reason = "half of a surrogate pair"
    except ValueError as error:  # of the hooks below, or a number with thousands of digits
        reason = str(error)
    return _malformed(text[begin:], f"no JSON that can be read: {reason}"), begin


def _as_call(value: Any, text: str, *, key: Sequence[str]) -> Call | Malformed:
    if not isinstance(value, dict):
        return _malformed(text, f"expected a JSON object, got {_kind(value)}")
    name, number = value.get("name"), value.get("id", "")
    if not isinstance(name, str) or not name:
        return _malformed(text, 'the object has no "name" that is a text')
    arguments: Any = next((value[each] for each in key if each in value), {})
    if not isinstance(arguments, dict):
        return _malformed(text, f'"{key[0]}" must be an object, got {_kind(arguments)}')
    return Call(name, arguments, number if isinstance(number, str) else "")


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def _malformed(text: str, reason: str) -> Malformed:
    return Malformed(text[:SHOWN], reason)


_SPACE = re.compile(r"\s*")


def _skip(text: str, begin: int) -> int:
    found = _SPACE.match(text, begin)
    return found.end() if found is not None else begin


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {json.dumps(twice[:40])} stands twice")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_constant=_constant, strict=False
)


def _writer(template: str, *, key: str) -> Callable[[str, Mapping[str, Any]], str]:
    def write(name: str, arguments: Mapping[str, Any]) -> str:
        return template.format(json.dumps({"name": name, key: arguments}, ensure_ascii=False))

    return write


def _tags(opening: str, closing: str, *, between: str = "") -> Format:
    return Format(
        find=lambda text: _tagged(text, tags=(opening, closing)),
        write=_writer(f"{opening}{between}{{}}{between}{closing}", key="arguments"),
    )


FORMATS: dict[str, Format] = {
    "hermes": _tags("<tool_call>", "</tool_call>", between="\n"),  # Hermes 2 Pro, Qwen2.5, Qwen3
    "llama": Format(find=_llama, write=_writer("{}", key="parameters")),  # Llama 3.1 and later
    "mistral": Format(find=_mistral, write=_writer("[TOOL_CALLS] [{}]", key="arguments")),
    "json_tags": _tags("<tool>", "</tool>"),  # for models whose template knows no tools
}
