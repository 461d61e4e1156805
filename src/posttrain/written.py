"""Tables and signatures of functions, parsed from source text without importing the modules.

A recipe is checked against signatures: the keyword-only parameters of a function are its options.
Most functions need torch, which takes seconds to load, and a typo should not. So the names of a
table and the signature of a function are parsed from the text of their modules. Where a module is
loaded already, or its text is not enough, the imported object is used: the answers are the same,
and a test shows it for every table.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import operator
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Function = Callable[..., Any]

_ROOT = Path(__file__).parent
_TYPES: dict[str, Any] = {each.__name__: each for each in (bool, int, float, str, list, object)}


class _UnreadableError(Exception):
    """The source text alone is not enough: import the module."""


def written_table(module: str, name: str) -> Mapping[str, Function]:
    """The table ``name`` of one of our modules; its functions are imported when they are called.

    >>> sorted(written_table("posttrain.algorithms.weights", "WEIGHTS"))
    ['sequence_mean', 'sequence_sum', 'token_mean']
    """
    if sys.modules.get(module) is not None:
        return typing.cast("Mapping[str, Function]", getattr(sys.modules[module], name))
    return _WrittenTable(module, name)


def written_function(module: str, name: str) -> Function:
    """The function ``name`` of one of our modules, imported when it is called.

    >>> from posttrain.registry import options
    >>> list(options(written_function("posttrain.algorithms.weights", "sequence_sum")))
    ['length']
    """
    if sys.modules.get(module) is not None:
        return typing.cast(Function, getattr(sys.modules[module], name))
    try:
        return _WrittenFunction(module, name)
    except _UnreadableError:
        return _load(module, name)


def real(function: Function) -> Function:
    """The function itself, imported where only its text has been read so far.

    >>> real(written_function("posttrain.algorithms.weights", "sequence_sum")).__name__
    'sequence_sum'
    """
    return function.load() if isinstance(function, _WrittenFunction) else function


class _WrittenTable(Mapping[str, Function]):
    """A dict of functions, from the text of the module that holds it."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        node = _names(module)[name]
        if not isinstance(node, ast.Dict):
            raise TypeError(f"{module}.{name}: not a plain dict; written_table needs one")
        self._functions = {
            ast.literal_eval(key): value.id
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None and isinstance(value, ast.Name)
        }
        if len(self._functions) != len(node.keys):
            raise TypeError(f"{module}.{name}: a row is not a name and a function")

    def __getitem__(self, name: str) -> Function:
        return written_function(self._module, self._functions[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


class _WrittenFunction:
    """Has the options of a function, and is that function once it is called."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        home, node = _follow(module, name)
        if not isinstance(node, ast.FunctionDef):
            raise _UnreadableError(f"{home}.{name}")
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    option.arg,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if value is None else _value(home, value),
                    annotation=_type(home, option.annotation),
                )
                for option, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            ]
        )

    def load(self) -> Function:
        return _load(self._module, self._name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.load()(*given, **options)


def _load(module: str, name: str) -> Function:
    return typing.cast(Function, getattr(importlib.import_module(module), name))


@functools.cache
def _names(module: str) -> dict[str, ast.AST]:
    """The names that the top level of a module defines, and the node that defines each."""
    place = _ROOT.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def _follow(module: str, name: str) -> tuple[str, ast.AST]:
    """The module that defines a name, and the node that does; imports of ours are followed."""
    node = _names(module).get(name)
    if node is None:
        raise _UnreadableError(f"{module}.{name}")
    if not isinstance(node, ast.ImportFrom):
        return module, node
    if node.level or not (node.module or "").startswith("posttrain."):
        raise _UnreadableError(f"{module}.{name}")
    original = next(item.name for item in node.names if name in (item.asname, item.name))
    return _follow(str(node.module), original)


def _value(module: str, node: ast.AST) -> Any:
    """A default: a literal, or a constant of ours."""
    if isinstance(node, ast.Name):
        return _value(*_follow(module, node.id))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise _UnreadableError(ast.unparse(node)) from None


def _type(module: str, node: ast.AST | None) -> Any:
    """An annotation: plain types, their unions, literals, and names of ours for these."""
    if node is None:
        return inspect.Parameter.empty
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name):
        return _TYPES[node.id] if node.id in _TYPES else _type(*_follow(module, node.id))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return operator.or_(_type(module, node.left), _type(module, node.right))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "typing.Literal"):
        choices = ast.literal_eval(node.slice)
        return typing.Literal[choices if isinstance(choices, tuple) else (choices,)]
    raise _UnreadableError(ast.unparse(node))
