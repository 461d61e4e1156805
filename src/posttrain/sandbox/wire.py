"""What the sandboxed programs share: plain data as JSON lines, and running a text as a module.

This file and its neighbours ``worker``, ``examiner``, ``remote`` and ``collected`` are copied into
sandboxes and run there by the system's Python, which may be older than ours and has the standard
library alone.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import types
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping

TYPE_CHECKING = False  # avoids importing typing, a tenth of the start of a sandbox
if TYPE_CHECKING:
    from typing import Any

    Each = Callable[[Iterable[Any]], list[Any]]  # a function that encodes, or decodes, every item

EXACT_IN_JSON = 2**53


# The class and its method are named, because a subclass may have overridden the method.
ENCODERS: list[tuple[type, str, Callable[[Any, Each], Any]]] = [
    (list, "list", lambda value, each: each(list.__iter__(value))),
    (tuple, "tuple", lambda value, each: each(tuple.__iter__(value))),
    (dict, "dict", lambda value, each: [each(pair) for pair in dict.items(value)]),
    (set, "set", lambda value, each: each(set.__iter__(value))),
    (frozenset, "frozenset", lambda value, each: each(frozenset.__iter__(value))),
    (bytes, "bytes", lambda value, each: bytes.hex(value)),
    (bytearray, "bytearray", lambda value, each: bytearray.hex(value)),
    (complex, "complex", lambda value, each: [value.real, value.imag]),
    (range, "range", lambda value, each: each([value.start, value.stop, value.step])),
    (slice, "slice", lambda value, each: each([value.start, value.stop, value.step])),
    (type({}.keys()), "keys", lambda value, each: each(value)),
    (type({}.values()), "values", lambda value, each: each(value)),
    (type({}.items()), "items", lambda value, each: [each(pair) for pair in value]),
]
DECODERS: dict[str, Callable[[Any, Each], Any]] = {
    "int": lambda content, each: int(content, 16),
    "list": lambda content, each: each(content),
    "tuple": lambda content, each: tuple(each(content)),
    "named": lambda content, each: _named(content[0], content[1])(*each(content[2])),
    "dict": lambda content, each: dict(map(each, content)),
    "set": lambda content, each: set(each(content)),
    "frozenset": lambda content, each: frozenset(each(content)),
    "bytes": lambda content, each: bytes.fromhex(content),
    "bytearray": lambda content, each: bytearray.fromhex(content),
    "complex": lambda content, each: complex(*map(float, content)),
    "range": lambda content, each: range(*each(content)),
    "slice": lambda content, each: slice(*each(content)),
    "keys": lambda content, each: dict.fromkeys(each(content)).keys(),
    "values": lambda content, each: dict(enumerate(each(content))).values(),
    "items": lambda content, each: dict(map(each, content)).items(),
    "iterator": lambda content, each: iter(each(content)),
}
# Types of the standard library that equal plain ones or stand in tests beside them: exact types
# alone, by name, because importing these modules would slow down every start. The second function
# gets the class, and what the first made.
_ISO = (
    lambda value, each: value.isoformat(),
    lambda kind, content, each: kind.fromisoformat(content),
)
_ITEMS = (lambda value, each: each(value), lambda kind, content, each: kind(each(content)))
_PAIRS = (
    lambda value, each: [each(pair) for pair in value.items()],
    lambda kind, content, each: kind(dict(map(each, content))),
)
STANDARD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "decimal.Decimal": (lambda value, each: str(value), lambda kind, content, each: kind(content)),
    "fractions.Fraction": (
        lambda value, each: each([value.numerator, value.denominator]),
        lambda kind, content, each: kind(*each(content)),
    ),
    "datetime.date": _ISO,
    "datetime.datetime": _ISO,
    "datetime.time": _ISO,
    "datetime.timedelta": (
        lambda value, each: [value.days, value.seconds, value.microseconds],
        lambda kind, content, each: kind(*content),
    ),
    "collections.deque": _ITEMS,
    "collections.Counter": _PAIRS,
    "collections.OrderedDict": _PAIRS,
}


def _named(name: str, fields: list[str]) -> Any:
    return namedtuple(name, fields)


class NotPlainError(TypeError):
    """A value that cannot travel as plain data."""


def encode(value: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """A value as JSON; ``keep`` says what stands for one that is no plain data.

    >>> encode(("a", None, {2: b"b"}))
    {'tuple': ['a', None, {'dict': [[2, {'bytes': '62'}]]}]}
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < EXACT_IN_JSON else {"int": hex(number)}

    def each(items: Iterable[Any]) -> list[Any]:
        return [encode(item, keep) for item in items]

    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if name in STANDARD:
        return {name: STANDARD[name][0](value, each)}
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return {"named": [kind.__name__, list(kind._fields), each(tuple.__iter__(value))]}
    for base, label, content in ENCODERS:
        if isinstance(value, base):
            return {label: content(value, each)}
    if keep is None:
        raise NotPlainError(f"a {type(value).__name__} is no plain data")
    return keep(value)


def decode(data: Any, find: Callable[[Any], Any] | None = None) -> Any:
    """The value that ``encode`` made JSON of: built-in types alone, even from forged JSON.

    >>> decode(encode([(1, 2), {"a": {3}}, b"b", range(3)]))
    [(1, 2), {'a': {3}}, b'b', range(0, 3)]
    """
    if isinstance(data, list):
        raise NotPlainError("a list without a name")
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "handle" and find is not None:
        return find(content)

    def each(items: Iterable[Any]) -> list[Any]:
        return [decode(item, find) for item in items]

    if kind in STANDARD:
        module, _, name = kind.rpartition(".")
        return STANDARD[kind][1](getattr(importlib.import_module(module), name), content, each)
    if kind not in DECODERS:
        raise NotPlainError(f"{kind!r} is no kind of plain data")
    return DECODERS[kind](content, each)


class Channel:
    """One end of a two-way line of messages, each a JSON object on a line of bounded length."""

    def __init__(self, reading: int, writing: int, *, max_bytes: int) -> None:
        self.source = os.fdopen(reading, "rb")
        self.sink = os.fdopen(writing, "wb")
        self.max_bytes = max_bytes

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message."""
        self.sink.write(json.dumps(message).encode("ascii") + b"\n")
        self.sink.flush()

    def receive(self) -> dict[str, Any]:
        """Read one message; ``EOFError`` where the other end is gone."""
        line = self.source.readline(self.max_bytes + 1)
        if not line.endswith(b"\n"):
            raise EOFError("too large" if len(line) > self.max_bytes else "the other end is gone")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise NotPlainError("the message is no JSON object")
        return message


class TextLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from a text that is not on the disk."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, f"{name}.py")
        self.text = text

    def get_code(self, fullname: str) -> types.CodeType:
        """The code object that an import executes."""
        return compile(self.text, self.path, "exec", dont_inherit=True)


def load_text(text: str, module: types.ModuleType) -> None:
    """Run a text as the body of a module: what the sandbox is there for."""
    TextLoader(module.__name__, text).exec_module(module)
