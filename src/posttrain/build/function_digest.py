"""A digest of a function of the user's, and of all that it uses: so an edited one is another.

It is the same in every process, and nothing is called to find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import numpy as np

_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, Decimal)
_PLAIN = (*_ATOMS, list, tuple, set, frozenset, dict, np.generic)
_MADE_OF: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__qualname__", "__self__"),
    types.ModuleType: ("__name__",),
    re.Pattern: ("pattern", "flags"),
    PurePath: ("parts",),
    types.CellType: ("cell_contents",),
    types.CodeType: ("co_code", "co_names", "co_consts"),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    **dict.fromkeys((staticmethod, classmethod, type(functools.cache(print))), ("__wrapped__",)),
}
_LIBRARIES = (Path(os.__file__).parent, Path(__file__).parents[1])  # Python's, and ours
_MOST = 500_000  # values that are looked into, which takes a few seconds
_DEEPEST = 60  # values inside one another


def function_digest(function: Any) -> str:
    """A digest of a function's text and of what it uses, the same in every process.

    That is its defaults, bound arguments, closure and the globals it reads, where they are plain
    data or code of the user's, which is followed in the same way. What a library defines, and any
    object that is not plain data, counts by name alone. What the function itself assigns
    (``nonlocal``, ``global``) is its memory, and does not count.
    """
    reader = _Reader(function, _MOST)
    whole = reader.text(function)
    # The list of names grows while it is read.
    used = [_together(_name(code), reader.read(code)) for code in reader.named]
    return _together(whole, *sorted(used))[:16]


class _Reader:
    """Turns values into text without calling them, and gathers the code that they name."""

    def __init__(self, root: Any, most: int) -> None:
        while issubclass(type(root), functools.partial):
            root = root.func
        self._root = root  # counts with its text even where a library defines it
        self.named: list[Any] = []  # functions and classes that are read once, each on its own
        self._path: set[int] = set()  # what is being described: a cycle ends here
        self._left = most

    def text(self, value: Any) -> str:
        """What a value counts as: never its address."""
        try:
            return repr(value) if type(value) in _ATOMS else self._inside(value)
        except Exception:  # noqa: BLE001 - a strange object counts by its type
            return _name(type(value))

    def _inside(self, value: Any) -> str:
        kind = type(value)
        self._left -= 1
        if self._left < 0 or id(value) in self._path or len(self._path) >= _DEEPEST:
            return _name(kind)
        self._path.add(id(value))
        try:
            own = self.text(kind) if _is_users(kind) else _name(kind)
            return f"{own} {self._data(value) or self._code(value) or self._state(value)}"
        finally:
            self._path.discard(id(value))

    def read(self, code: Any) -> str:
        """All that a function or class of the user's consists of."""
        try:
            return self._class(code) if isinstance(code, type) else self._function(code)
        except Exception:  # noqa: BLE001 - as above
            return _name(code)

    def _class(self, kind: type) -> str:
        members = {
            name: member
            for name, member in vars(kind).items()
            if not name.startswith("__") or type(member) is types.FunctionType
        }
        return self._all(kind.__bases__, members)

    def _all(self, *values: Any) -> str:
        return _together(*map(self.text, values))

    def _data(self, value: Any) -> str:
        """Plain data, read by the methods of the built-in types; empty for anything else."""
        base: Any = next((base for base in _PLAIN if issubclass(type(value), base)), None)
        reader = self
        if base in (set, frozenset, dict) and base.__len__(value) > self._left:
            reader = _Reader(None, 0)  # only its atoms: to stop half-way would depend on the order
        if base in (list, tuple):
            return _together(*map(self.text, base.__iter__(value)))
        if base in (set, frozenset):
            return _together(*sorted(map(reader.text, base.__iter__(value))))
        if base is dict:
            return _together(*sorted(reader._all(*item) for item in dict.items(value)))
        if base is np.generic:
            return f"{value.dtype} {value.tobytes().hex()}"
        return "" if base is None else str(base.__repr__(value))

    def _code(self, value: Any) -> str:
        """What can be called, and what it is made of; empty for an object."""
        kind = type(value)
        for known, parts in _MADE_OF.items():
            if issubclass(kind, known):
                return self._all(*(getattr(value, part, None) for part in parts))
        if kind is not types.FunctionType and not issubclass(kind, type):
            return ""
        if value is not self._root and not _is_users(value):
            return f"{value.__module__}.{value.__qualname__}"
        if "<" in value.__qualname__ or getattr(value, "__closure__", None):
            return self.read(value)  # several may have this name, each with values of its own
        if not any(value is known for known in self.named):
            self.named.append(value)
        return str(value.__qualname__)

    def _state(self, value: Any) -> str:
        """The attributes of an object of the user's, or of a dataclass; empty for another."""
        kind = type(value)
        if not dataclasses.is_dataclass(kind) and not _is_users(kind):
            return ""
        state: dict[str, Any] = {}
        slots = [slot for base in kind.__mro__ for slot in vars(base).values()]
        for slot in (slot for slot in slots if type(slot) is types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # not set
                state[slot.__name__] = slot.__get__(value)
        with contextlib.suppress(AttributeError):
            state |= object.__getattribute__(value, "__dict__")
        return self.text(state)

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        source: Any = code
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(code)
        steps = [step for inner in _nested(code) for step in dis.get_instructions(inner)]
        loaded = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        stored = {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "STORE_DEREF")}
        closed = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        used = {name: value for name, value in function.__globals__.items() if name in loaded}
        names = {name for inner in _nested(code) for name in inner.co_names}
        kept = {name: value for name, value in (closed | used).items() if name not in stored}
        kept |= _members(used.values(), names)
        defaults = (function.__defaults__, function.__kwdefaults__)
        return self._all(source, defaults, vars(function), kept)


def _together(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _name(value: Any) -> str:
    try:
        return str(value.__qualname__)
    except Exception:  # noqa: BLE001 - a metaclass may forbid it
        return "?"


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _members(values: Iterable[Any], names: set[str]) -> dict[str, Any]:
    """What of the user's modules among these goes by such a name: ``helpers.clean``."""
    modules = [value for value in values if type(value) is types.ModuleType and _is_users(value)]
    found: dict[str, Any] = {}
    for module in modules:  # a package may lead to more
        for name in names & vars(module).keys():
            value = found[f"{module.__name__}.{name}"] = vars(module)[name]
            if type(value) is types.ModuleType and _is_users(value) and value not in modules:
                modules.append(value)
    return found


def _is_users(value: Any) -> bool:
    """Whether a function, class or module is neither Python's, nor an installed one, nor ours."""
    if isinstance(value, types.FunctionType):
        return _is_users_file(value.__code__.co_filename)
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True
    known = vars(module)  # a folder without __init__.py has a path and no file
    return _is_users_file(known.get("__file__") or next(iter(known.get("__path__", ())), "<frozen"))


@functools.cache
def _is_users_file(file: str) -> bool:
    path = Path(file).absolute()
    return (
        not path.name.startswith("<frozen")
        and not {"site-packages", "dist-packages"} & set(path.parts)
        and not any(path.is_relative_to(folder) for folder in _LIBRARIES)
    )
