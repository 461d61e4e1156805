"""A digest of a function of the user's: the files that define it, and the values it holds.

It is the same in every process. Functions that differ have digests that differ; so may one
function before and after an edit that changes nothing, of a comment for one.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...)}
_CONTAINERS = (list, tuple, set, frozenset, dict)
_UNORDERED = (set, frozenset, dict)
_HOLDERS = (
    *(types.CodeType, types.CellType, types.MethodType, property, staticmethod, classmethod),
    *(functools.partial, functools.cached_property, type(functools.cache(print))),
)
_HELD = (
    *("co_code", "co_consts", "co_names", "co_varnames", "cell_contents", "__func__", "__self__"),
    *("fget", "fset", "func", "args", "keywords", "__wrapped__"),
)
_BUILT_IN = frozenset(sys.builtin_module_names)
_LIBRARIES = (Path(os.__file__).parent, Path(__file__).parents[1])  # Python's, and ours


def function_digest(function: Any) -> str:
    """A digest of a function's modules, as files, and of what it was made with, by value.

    The files are those of the user's modules that it leads to and of what they import. Values are
    defaults, bound arguments, closure, attributes, and the globals that it names: plain data and
    what else is compared by value. An object of a library that is compared by identity (a lock, a
    model) counts by its type, and what a library defines by its name.
    """
    reader = _Reader()
    try:
        values = reader.text(function)
    except RecursionError:
        raise ValueError(
            "a function of your own holds a value that is nested too deep to be compared with that "
            "of another run: make it where the function is called, or hold it flat"
        ) from None
    return _together(values, *sorted(_files(reader.modules)))[:16]


class _Reader:
    """Turns values into text that has no address in it, and gathers the user's modules."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._known: dict[int, tuple[str, Any]] = {}  # with the value, so that no id is used twice
        self._path: list[int] = []  # what is being read: a cycle ends here

    def text(self, value: Any) -> str:
        """What a value counts as."""
        kind = type(value)
        if kind in _ATOMS:
            return f"{kind.__name__} {hex(value) if kind is int else repr(value)}"  # of any length
        if kind in (list, tuple) and all(type(part) in _ATOMS for part in value):  # most there is
            return _together(kind.__name__, *map(self.text, value))
        if id(value) in self._path:
            return f"cycle {self._path.index(id(value))}"
        if id(value) not in self._known:
            self._path.append(id(value))
            try:
                parts = self._parts(value)
            except RecursionError:
                raise
            except Exception:  # noqa: BLE001 - what cannot be read counts by its type
                parts = []
            texts = [self.text(part) for part in parts]
            texts = sorted(texts) if issubclass(kind, _UNORDERED) else texts
            self._path.pop()
            self._known[id(value)] = (_together(type.__repr__(kind), *texts), (value, parts))
        return self._known[id(value)][0]

    def _parts(self, value: Any) -> list[Any]:
        """What a value consists of; of the user's classes, no method is called."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value)
        if issubclass(kind, types.ModuleType):
            return [value.__name__, self._is_users(value.__name__)]
        if issubclass(kind, type):
            return self._class(value)
        if issubclass(kind, _HOLDERS):
            return [getattr(value, name) for name in _HELD if hasattr(value, name)]
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        base: Any = next((b for b in (*_ATOMS, *_CONTAINERS) if issubclass(kind, b)), object)
        data: list[Any] = [base.__repr__(value)] if base in _ATOMS else []
        if base in _CONTAINERS:
            data = list(dict.items(value) if base is dict else base.__iter__(value))
        if base in (set, frozenset):  # functions that call each other: the same one comes first
            data.sort(key=lambda item: str(getattr(item, "__qualname__", "")))
        if kind is not base and self._is_users(kind.__module__):
            return [*data, kind, object.__getstate__(value)]
        if hasattr(kind, "tolist"):  # an array or a tensor
            return [str(value.dtype), str(value.shape), value.tolist()]
        if base is not object or inspect.getattr_static(kind, "__hash__") is object.__hash__:
            return data
        reduce = copyreg.dispatch_table.get(kind, lambda value: value.__reduce_ex__(4))
        return [list(p) if isinstance(p, Iterator) else p for p in reduce(value)]

    def _function(self, function: types.FunctionType) -> list[Any]:
        name, closure = function.__qualname__, function.__closure__ or ()
        if not self._is_users(function.__globals__.get("__name__")):
            return [function.__module__, name, *(closure if "<locals>" in name else ())]
        named = set(_names(function.__code__))
        used = {name: value for name, value in function.__globals__.items() if name in named}
        defaults = (function.__defaults__, function.__kwdefaults__)
        return [name, function.__code__, *closure, *defaults, vars(function), used]

    def _class(self, kind: type) -> list[Any]:
        if not self._is_users(kind.__module__):
            return [kind.__module__, kind.__qualname__]
        own = vars(kind).items()  # what libraries leave in a class may hold addresses
        members = {n: m for n, m in own if n[:2] != "__" or type(m) is types.FunctionType}
        return [kind.__qualname__, kind.__bases__, members]

    def _is_users(self, name: Any) -> bool:
        """Whether a module is neither Python's, nor an installed one, nor ours; if so, noted."""
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in _BUILT_IN or (file is not None and not _is_users_file(file)):
            return False
        self.modules |= {name} if file else set()
        return True


def _files(modules: Iterable[str]) -> Iterator[str]:
    """The contents of the user's files behind modules, and behind all that these import."""
    waiting, seen = set(modules), set()
    while waiting:
        full = waiting.pop()
        for name in accumulate(full.split("."), "{}.{}".format):  # packages first: they import too
            file, package = _place(name)
            if package is None or (file and not _is_users_file(file)):
                break  # what is of a library is not looked for further, for that would import it
            if file and name not in seen and Path(file).is_file():
                seen.add(name)
                text = Path(file).read_bytes()
                yield f"{name} {hashlib.sha256(text).hexdigest()}"
                waiting |= set(_imports(text, package))
            if package != name:  # no package: what follows is no module
                break


def _place(name: str) -> tuple[str | None, str | None]:
    """The file and the package of a module that may not be imported yet; None for none."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None), getattr(module, "__package__", None) or ""
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 - the package it is in cannot be imported
        spec = None
    return (spec.origin if spec.has_location else None, spec.parent) if spec else (None, None)


def _imports(text: bytes, package: str) -> Iterator[str]:
    """The modules that a file may import, wherever in it the statement stands."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # compiled, or broken since it was imported
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and package.count(".") + bool(package) >= node.level:
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _together(*texts: str) -> str:
    whole = "".join(f"{len(text)} {text}" for text in texts)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def _is_users_file(file: str) -> bool:
    parts = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not parts and not any(Path(file).absolute().is_relative_to(lib) for lib in _LIBRARIES)
