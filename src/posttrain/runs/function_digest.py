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
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...)}
_CONTAINERS = (list, tuple, set, frozenset, dict)
_UNORDERED = _CONTAINERS[2:]
_HOLDERS = (
    *(types.CodeType, types.CellType, types.MethodType, property, staticmethod, classmethod),
    *(functools.partial, functools.cached_property, type(functools.cache(print))),
)
_HELD = (
    *("co_code", "co_consts", "co_names", "co_varnames", "cell_contents", "__func__", "__self__"),
    *("fget", "fset", "func", "args", "keywords", "__wrapped__"),
)
_BYTES = "?bBhHiIlLqQefdFDmMSU"  # types of arrays that are their bytes, without gaps or addresses
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
    return _together(*reader.texts(function), *sorted(_files(reader.modules)))[:16]


class _Reader:
    """Turns values into text that has no address in it, and gathers the user's modules."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def texts(self, root: Any) -> list[str]:
        """What a value counts as: its text, and those of all in it that leads to a cycle.

        The latter are made of the texts of the parts again and again, until no more of them differ
        (colour refinement). The order in which values are met is in none of them.
        """
        values = [root]  # which holds all of them, so that no id is used twice
        parts: dict[int, tuple[type, list[Any]]] = {}  # the text of a plain part, the id of another
        for value in values:
            if id(value) not in parts:
                pairs = [(_plain(part) or id(part), part) for part in self._parts(value)]
                parts[id(value)] = (type(value), [key for key, _ in pairs])
                values += [part for key, part in pairs if type(key) is int]
        texts: dict[int, str] = {}
        rest, before = list(reversed(parts)), -1
        while len(rest) != before:  # from the inside: what leads to no cycle
            before, waiting, rest = len(rest), rest, []
            for key in waiting:
                if any(type(part) is int and part not in texts for part in parts[key][1]):
                    rest.append(key)
                else:
                    texts[key] = _text(parts[key], texts)
        texts |= dict.fromkeys(rest, "")
        classes, before = 0, -1
        while classes != before:
            texts |= {key: _text(parts[key], texts) for key in rest}
            classes, before = len({texts[key] for key in rest}), classes
        return [texts[id(root)], *sorted({texts[key] for key in rest})]

    def _parts(self, value: Any) -> list[Any]:
        """What a value consists of; of the user's classes, no method is called."""
        kind = type(value)
        try:
            if kind is types.FunctionType:
                return self._function(value)
            if issubclass(kind, types.ModuleType):
                return [value.__name__, self._is_users(value.__name__)]
            if issubclass(kind, type):
                return self._class(value)
            if issubclass(kind, _HOLDERS):
                return [getattr(value, name) for name in _HELD if hasattr(value, name)]
            return self._object(value)
        except Exception:  # noqa: BLE001 - what cannot be read counts by its type
            return []

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        base: Any = next((b for b in (*_ATOMS, *_CONTAINERS) if issubclass(kind, b)), object)
        data: list[Any] = [base.__repr__(value)] if base in _ATOMS else []
        if base in _CONTAINERS:
            data = list(dict.items(value) if base is dict else base.__iter__(value))
        if hasattr(kind, "tolist"):  # an array or a tensor
            data = _array(value)
        if kind is not base and self._is_users(kind.__module__):
            return [*data, kind, object.__getstate__(value)]
        by_identity = inspect.getattr_static(kind, "__hash__") is object.__hash__
        if data or base is not object or by_identity:
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


def _array(value: Any) -> list[Any]:
    """An array or a tensor: by its bytes where they are all there is to it, else by its numbers."""
    about = [str(getattr(value, "dtype", "")), str(getattr(value, "shape", ""))]
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    if torch and issubclass(type(value), torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        value = value.reshape(-1).view(torch.uint8).numpy()
    if numpy and type(value) is numpy.ndarray and value.dtype.char in _BYTES:
        return [*about, hashlib.sha256(value.tobytes()).digest()]
    return [*about, value.tolist()]


def _files(modules: Iterable[str]) -> Iterator[str]:
    """The contents of the user's files behind modules, and behind all that these import."""
    waiting, seen = set(modules), set()
    while waiting:
        folders = None
        for name in accumulate(waiting.pop().split("."), "{}.{}".format):  # packages import too
            file, package, folders = _place(name, folders)
            if file and not _is_users_file(file):
                break
            if file and name not in seen and Path(file).is_file():
                seen.add(name)
                text = Path(file).read_bytes()
                yield f"{name} {hashlib.sha256(text).hexdigest()}"
                waiting |= set(_imports(text, package))
            if folders is None:  # no package: what follows is no module
                break


def _place(name: str, within: list[str] | None) -> tuple[str | None, str, list[str] | None]:
    """A module's file, its package, and its folders if it is one; nothing is imported for that."""
    if name in sys.modules:
        keys = ("__file__", "__package__", "__path__")
        file, package, folders = (getattr(sys.modules[name], key, None) for key in keys)
        return file, package or "", folders and list(folders)
    parent, _, own = name.rpartition(".")
    spec = PathFinder.find_spec(own, within) if parent else importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    file = spec.origin if spec and spec.has_location else None
    return file, parent if folders is None else name, folders and list(folders)


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


def _plain(value: Any) -> str:
    """The text of plain data: most that there is; nothing for other values."""
    kind = type(value)
    if kind in (list, tuple) and all(type(part) in _ATOMS for part in value):
        return _together(kind.__name__, *map(_plain, value))
    text = (hex if kind is int else repr)(value) if kind in _ATOMS else ""  # int of any length
    return text and f"{kind.__name__} {text}"


def _text(of: tuple[type, list[Any]], texts: dict[int, str]) -> str:
    kind, parts = of
    found = [texts.get(part, part) for part in parts]
    found = sorted(found) if issubclass(kind, _UNORDERED) else found
    return _together(type.__repr__(kind), *found)


def _together(*texts: str) -> str:
    whole = "".join(f"{len(text)} {text}" for text in texts)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def _is_users_file(file: str) -> bool:
    parts = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not parts and not any(Path(file).absolute().is_relative_to(lib) for lib in _LIBRARIES)
