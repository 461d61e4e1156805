"""Rewrites tests for the examiner: each case reports by itself, and free names are resolved."""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Literal

from posttrain.sandbox.blocks import UNREADABLE

Style = Literal["script", "collected", "doctest"]

COMPOUND = ast.For | ast.While | ast.If | ast.With | ast.Try
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = FUNCTIONS | ast.ClassDef
SOLUTION_MODULES = frozenset({"solution", "submission", "candidate", "main", "__main__"})
TEST_MODULES = frozenset({"pytest", "unittest"})
CLASS_NAME = re.compile("[A-Z][A-Za-z0-9]*")
# Attributes that plain data has too: using one does not show that a value is an object.
PLAIN_ATTRIBUTES = frozenset(
    name
    for kind in (str, bytes, list, tuple, dict, set, int, float, complex, range, date)
    for name in dir(kind)
)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Rewritten tests: their text, how many cases, and the names they want of the solution.

    ``classes`` are those of the names whose objects the tests treat as objects, ``called`` the
    functions that the tests call themselves, at the top.
    """

    text: str
    num_cases: int
    names: tuple[str, ...]
    style: Style = "script"
    classes: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    entry_point: str = ""


@functools.lru_cache(maxsize=4096)
def prepare(tests: str, *, entry_point: str = "", preamble: str = "") -> Questions:
    """Rewrite tests so that every case reports on its own, and every assertion is counted.

    A case is a statement at the top of the file, or of the body of ``check``, that is or holds an
    assert; the functions and classes that pytest would run are found when they are loaded. The
    solution gives the names that the tests use and do not define, except the built-in ones: a
    solution that defines ``abs`` must not decide how far apart two numbers are.

    >>> prepare("assert double(2) == 4\\nassert double(0) == 0").names
    ('double',)
    """
    tests = tests.lstrip("\ufeff")
    examples = _doctest(tests)
    if examples:
        sources = [example.source for example in doctest.DocTestParser().get_examples(examples)]
        tree = _parse("".join(sources))
        imported = _take_solution_imports(tree)
        names = tuple(sorted({*_free_names(tree.body, entry_point)[0], *imported}))
        classes = _classes(tree.body, names)
        return Questions(text=examples, num_cases=0, names=names, style="doctest", classes=classes)
    tree = _parse(tests)
    imported = _take_solution_imports(tree)
    _open_main(tree, run=not any(map(_is_test, _reached(tree.body))))
    check = _check_function(tree)
    if check is not None and "check" not in _called_in(tree):
        if check.args.args and not entry_point:
            raise ValueError(
                "tests: they define check(candidate); name the function as entry_point"
            )
        given = entry_point if check.args.args else ""
        tree.body += ast.parse(f"check({given})").body
    helpers = _helpers(preamble, entry_point)
    names, modules = _free_names([*helpers, *tree.body], entry_point)
    names = tuple(sorted({*names, *imported}))
    collected = any(map(_is_test, _reached(tree.body))) or _uses_test_modules(tree, modules)
    if not (collected or any(map(_is_assertion, ast.walk(tree)))):
        raise ValueError("tests: there is no assert in them; write `assert f(1) == 2`")
    classes = _classes([*helpers, *tree.body], names)
    run = [part for part in _reached(tree.body) if not isinstance(part, SCOPES)]
    called = tuple(sorted({name for part in run for name in _called_in(part)}))
    _Counting().visit(tree)
    num_cases = _mark_cases(tree.body, check)
    if not num_cases and not collected:  # asserts only in helpers: the whole file is one case
        tree.body, num_cases = [_reporting(0, tree.body)], 1
    imports = [ast.Import([ast.alias(name)]) for name in modules]
    # An import from __future__ would have to come first, and tests do not need it.
    body = [n for n in (*helpers, *tree.body) if getattr(n, "module", "") != "__future__"]
    return Questions(
        text=ast.unparse(ast.fix_missing_locations(ast.Module([*imports, *body], []))),
        num_cases=num_cases,
        names=names,
        style="collected" if collected else "script",
        classes=classes,
        called=called,
        entry_point=entry_point,
    )


def _parse(tests: str) -> ast.Module:
    try:
        return ast.parse(tests)
    except UNREADABLE as error:
        raise ValueError(f"tests: they are not Python: {error}") from error


def _doctest(tests: str) -> str:
    """The examples of a doctest with the text around them, where tests hold nothing else."""
    if ">>>" not in tests:
        return ""
    try:
        nodes = list(ast.walk(ast.parse(tests)))
    except UNREADABLE:
        return tests
    if any(_is_assertion(node) or _is_test(node) for node in nodes):
        return ""
    documented = [node for node in nodes if isinstance(node, SCOPES | ast.Module)]
    return "\n\n".join(ast.get_docstring(node) or "" for node in documented).strip()


def _take_solution_imports(tree: ast.Module) -> set[str]:
    """Drop imports of a module that is the solution; what is imported from it, by name."""
    taken: set[str] = set()
    modules: set[str] = set()

    class Taker(ast.NodeTransformer):
        def visit_Import(self, node: ast.Import) -> ast.stmt | None:
            own = [alias for alias in node.names if alias.name in SOLUTION_MODULES]
            modules.update(alias.asname or alias.name for alias in own)
            node.names = [alias for alias in node.names if alias not in own]
            return node if node.names else ast.Pass()

        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
            if node.module not in SOLUTION_MODULES:
                return node
            named = [alias for alias in node.names if alias.name != "*"]
            taken.update(alias.name for alias in named)
            renamed = [alias for alias in named if alias.asname]
            texts = "\n".join(f"{alias.asname} = {alias.name}" for alias in renamed) or "pass"
            return ast.parse(texts).body

    class Shortener(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
            self.generic_visit(node)
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                taken.add(node.attr)
                return ast.Name(node.attr, node.ctx)
            return node

    Taker().visit(tree)
    if modules:
        Shortener().visit(tree)
    return taken


def _open_main(tree: ast.Module, *, run: bool) -> None:
    """Replace ``if __name__ == "__main__":`` by its body, or drop it."""
    body: list[ast.stmt] = []
    for statement in tree.body:
        is_guard = isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)
        if not is_guard:
            body.append(statement)
        elif run and isinstance(statement, ast.If):
            body += statement.body
    tree.body = body


def _reached(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those under ``if`` or ``try``, in no function."""
    for statement in body:
        yield statement
        if isinstance(statement, COMPOUND):
            for name in ("body", "orelse", "finalbody"):
                yield from _reached(getattr(statement, name, []))


def _is_test(node: ast.AST) -> bool:
    """Whether pytest would take it for a test."""
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)
    return isinstance(node, FUNCTIONS) and node.name.startswith("test")


def _uses_test_modules(tree: ast.Module, modules: list[str]) -> bool:
    nodes = list(ast.walk(tree))
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    return not TEST_MODULES.isdisjoint({name.split(".")[0] for name in names} | set(modules))


def _check_function(tree: ast.Module) -> ast.FunctionDef | None:
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    return found[-1] if found else None


def _called_in(tree: ast.AST) -> set[str]:
    """The names that a piece of code calls."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _helpers(preamble: str, entry_point: str) -> list[ast.stmt]:
    """What the preamble defines besides the tested function: the examiner runs its own copy."""
    try:
        body = ast.parse(preamble).body
    except UNREADABLE:
        return []  # the preamble ends inside a function, which the completion continues
    return [node for node in body if getattr(node, "name", "") != entry_point]


def _is_assertion(node: ast.AST) -> bool:
    """An assert, or a call such as ``raises(...)`` and ``self.assertEqual(...)``."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name == "raises" or name.startswith("assert")


class _Counting(ast.NodeTransformer):
    """Counts every assert, and every handler of a ``try`` in which an assertion is to fail."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        node.test = ast.Call(ast.Name("__asserted__", ast.Load()), [node.test], [])
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        expects = any(_is_assertion(n) for s in (*node.body, *node.orelse) for n in ast.walk(s))
        self.generic_visit(node)
        for handler in node.handlers if expects else []:
            handler.body = [*ast.parse("__asserted__()").body, *handler.body]
        return node


def _mark_cases(body: list[ast.stmt], check: ast.FunctionDef | None) -> int:
    """Wrap every case so that it reports itself; returns their number."""
    num_cases = 0
    for statements in [body] if check is None else [body, check.body]:
        for place, statement in enumerate(statements):
            asserts = any(map(_is_assertion, ast.walk(statement)))
            if isinstance(statement, ast.Assert | COMPOUND) and asserts:
                statements[place] = _reporting(num_cases, [statement])
                num_cases += 1
    return num_cases


def _reporting(number: int, body: list[ast.stmt]) -> ast.stmt:
    """``with __case__(number): body``: the examiner's ``__case__`` reports how it ended."""
    case = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(number)], [])
    return ast.With([ast.withitem(case)], body)


def _classes(body: list[ast.stmt], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that the tests treat as classes: written as such, or whose objects have attributes.

    ``x = make(2)`` and ``x.push(1)``: no plain data has a ``push``.
    """
    nodes = list(ast.walk(ast.Module(body, [])))
    made: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and (maker := _maker(node.value, names)):
            made |= {ast.unparse(target): maker for target in node.targets}
    found = {name for name in names if CLASS_NAME.fullmatch(name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in PLAIN_ATTRIBUTES:
            found.add(_maker(node.value, names) or made.get(ast.unparse(node.value), ""))
    return tuple(sorted(found - {""}))


def _maker(node: ast.expr, names: tuple[str, ...]) -> str:
    """The solution's name that is called in ``name(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        return node.func.id
    return ""


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
    modules = free & dotted & (sys.stdlib_module_names | TEST_MODULES) - {entry_point}
    names = free - modules - set(dir(builtins)) | ({entry_point} - {""})
    return tuple(sorted(names)), sorted(modules)
