"""Tests as the examiner runs them: each case reports by itself, and names say whose they are."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from dataclasses import dataclass

COMPOUND = ast.For | ast.While | ast.If | ast.With | ast.Try
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Rewritten tests: their text, how many cases, and the names they want of the solution."""

    text: str
    num_cases: int
    names: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def prepare(tests: str, *, entry_point: str = "", preamble: str = "") -> Questions:
    """Rewrite tests so that every assert reports on its own.

    A case is a statement at the top of the file, or of the body of ``check``, that is or holds an
    assert. The solution gives the names that the tests use and do not define, except the built-in
    ones: a solution that defines ``abs`` must not decide how far apart two numbers are.

    >>> prepare("assert double(2) == 4\\nassert double(0) == 0").names
    ('double',)
    """
    tree = _parse(tests)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("tests: there is no assert in them; write `assert f(1) == 2`")
    check = _check_function(tree)
    if check is not None and not entry_point:
        raise ValueError("tests: they define check(candidate); name the function as entry_point")
    helpers = _helpers(preamble, entry_point)
    names, modules = _free_names([*helpers, *tree.body], entry_point)
    num_cases = 0
    for body in [tree.body] if check is None else [tree.body, check.body]:
        for place, statement in enumerate(body):
            if isinstance(statement, ast.Assert | COMPOUND) and _holds_assert(statement):
                body[place] = _reporting([statement])
                num_cases += 1
    if check is not None and not _calls_check(tree):
        tree.body += ast.parse(f"check({entry_point})").body
    if not num_cases:  # the asserts are in helpers: all in all one case
        tree.body, num_cases = [_reporting(tree.body)], 1
    imports = [ast.Import([ast.alias(name)]) for name in modules]
    # An import from __future__ would have to come first, and says nothing that a test needs.
    body = [n for n in (*helpers, *tree.body) if getattr(n, "module", "") != "__future__"]
    text = ast.unparse(ast.fix_missing_locations(ast.Module([*imports, *body], [])))
    return Questions(text=text, num_cases=num_cases, names=names)


def _parse(tests: str) -> ast.Module:
    try:
        return ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests: they are no Python: {error}") from error


def _check_function(tree: ast.Module) -> ast.FunctionDef | None:
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    return found[-1] if found else None


def _calls_check(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "check"
        for node in tree.body
    )


def _helpers(preamble: str, entry_point: str) -> list[ast.stmt]:
    """What the preamble defines besides the function asked for: the examiner has its own copy."""
    try:
        body = ast.parse(preamble).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # it ends within a function, which the completion goes on with
    return [node for node in body if getattr(node, "name", "") != entry_point]


def _holds_assert(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _reporting(body: list[ast.stmt]) -> ast.stmt:
    """``with __case__: body``: the examiner's ``__case__`` reports how it ended."""
    return ast.With([ast.withitem(ast.Name("__case__", ast.Load()))], body)


def _free_names(body: list[ast.stmt], entry_point: str) -> tuple[tuple[str, ...], list[str]]:
    """What the tests use and do not bind: the solution's names, and standard modules.

    A module that the tests use as ``math.pi`` without importing it is imported for them; it is
    never the solution's.
    """
    used: set[str] = set()
    dotted: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted.add(node.value.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, SCOPES):
            bound.add(node.name)
    free = used - bound
    modules = free & dotted & sys.stdlib_module_names - {entry_point}
    names = free - modules - set(dir(builtins)) | ({entry_point} - {""})
    return tuple(sorted(names)), sorted(modules)
