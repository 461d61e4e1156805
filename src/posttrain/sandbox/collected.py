"""Runs tests as pytest would: functions, classes, unittest's cases; and doctests."""

from __future__ import annotations

import sys
import types
from functools import partial
from itertools import product

from posttrain.sandbox.examiner import BrokenTestsError, Case, SkippedError
from posttrain.sandbox.pytest_module import Capture, Mark, Pytest, Values
from posttrain.sandbox.remote import NotDefinedError
from posttrain.sandbox.wire import load_text

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from posttrain.sandbox.examiner import Examiner


class Runner:
    """Finds the tests of a module, and runs each as a case."""

    def __init__(self, examiner: Examiner, module: types.ModuleType, *, task: Any) -> None:
        self.examiner, self.module = examiner, module
        self.entry_point = task["entry_point"]
        self.called = frozenset(task["called"])
        self.first = task["num_cases"]
        self.shared: dict[str, Any] = {}
        self.ready: set[type] = set()  # classes whose setup_class has run
        # Generators of shared fixtures, to be finished at the end.
        self.endings: list[Iterator[Any]] = []

    def run(self) -> None:
        """Run every test that is found."""
        units = list(self.units(self.module))
        self.examiner.report.send({"cases": self.first + len(units)})
        for name in ("setup_module", "setUpModule"):
            self.hook(self.module, name)
        for number, unit in enumerate(units, start=self.first):
            with Case(self.examiner, number, asserts=False):
                unit()

    def units(self, home: Any) -> Iterator[Callable[[], None]]:
        """The tests of a module or class, in order."""
        for name, value in _members(home).items():
            if isinstance(value, type) and _is_test_case(value):
                yield from self.cases_of(value)
            elif isinstance(value, type) and name.startswith("Test"):
                if vars(value).get("__init__") is None:
                    yield from self.units(value)
            elif isinstance(value, types.FunctionType) and name.startswith("test"):
                if hasattr(value, "__fixture__"):
                    continue
                for given in self.rows(home, value):
                    known = given.keys() | self.fixtures(home).keys()
                    if known.issuperset(_wanted(value, home)) or name not in self.called:
                        yield partial(self.single, home, value, given=given)

    def rows(self, home: Any, function: Any) -> Iterator[dict[str, Any]]:
        """The arguments from ``parametrize``, one dict for each run of a test."""
        marks = [*getattr(home, "__marks__", []), *getattr(function, "__marks__", [])]
        tables = []
        for mark in [mark for mark in marks if mark.name == "parametrize"]:
            if "indirect" in mark.named:
                raise BrokenTestsError("the tests use indirect parameters, which is not supported")
            given = {**dict(zip(("argnames", "argvalues"), mark.args)), **mark.named}  # noqa: B905
            names, values = given["argnames"], given["argvalues"]
            names = names.replace(",", " ").split() if isinstance(names, str) else list(names)
            tables.append([_row(names, row) for row in values])
        for rows in product(*reversed(tables)):
            skips = [mark for row in rows for mark in row[1]] + marks
            if not any(map(_is_skipped, skips)):
                yield {name: value for row in rows for name, value in row[0].items()}

    def single(self, home: Any, function: Any, *, given: dict[str, Any]) -> None:
        """Run one test: set up, call, tear down."""
        owner = home() if isinstance(home, type) else None
        if owner is not None:
            self.once(home, "setup_class")
        endings: list[Iterator[Any]] = []
        values = dict(given)
        fixtures = self.fixtures(home)
        given_to: Any = {"fixtures": fixtures, "values": values, "owner": owner, "endings": endings}
        before, after = ("setup_function", "teardown_function")
        if owner is not None:
            before, after = ("setup_method", "teardown_method")
        try:
            for name, fixture in fixtures.items():
                if fixture.__fixture__["autouse"]:
                    self.resolve(name, **given_to)
            self.hook(owner or self.module, before, function)
            wanted = _wanted(function, home)
            for name in wanted:
                self.resolve(name, **given_to)
            bound = (owner,) if owner is not None and not _is_static(home, function) else ()
            _finish(function(*bound, **{name: values[name] for name in wanted}))
        finally:
            self.hook(owner or self.module, after, function)
            for ending in reversed(endings):
                for _ in ending:
                    pass

    def resolve(
        self,
        name: str,
        *,
        fixtures: dict[str, Any],
        values: dict[str, Any],
        owner: Any,
        endings: list[Iterator[Any]],
    ) -> None:
        """The value of a fixture, after those that it takes itself."""
        if name in values:
            return
        if name in self.shared:
            values[name] = self.shared[name]
            return
        if name not in fixtures:
            if name == "candidate" and self.entry_point:
                values[name] = getattr(self.module, self.entry_point)
                return
            if name == "capsys":
                values[name] = Capture()
                return
            raise BrokenTestsError(f"the tests want the fixture {name!r}, which is not supported")
        fixture = fixtures[name]
        in_class = owner is not None and _owns(type(owner), fixture)
        wanted = _wanted(fixture, type(owner) if in_class else None)
        for other in wanted:
            self.resolve(other, fixtures=fixtures, values=values, owner=owner, endings=endings)
        made = fixture(
            *((owner,) if in_class else ()), **{other: values[other] for other in wanted}
        )
        shared = fixture.__fixture__["scope"] != "function"
        if isinstance(made, types.GeneratorType):
            (self.endings if shared else endings).append(made)
            made = next(made)
        values[name] = _finish(made)
        if shared:
            self.shared[name] = values[name]

    def fixtures(self, home: Any) -> dict[str, Any]:
        """The fixtures that a test of this class or module can use, by name."""
        found = {**_members(self.module), **(_members(home) if isinstance(home, type) else {})}
        kept = {n: f for n, f in found.items() if isinstance(f, types.FunctionType)}
        return {f.__fixture__["name"] or n: f for n, f in kept.items() if hasattr(f, "__fixture__")}

    def once(self, home: type, name: str) -> None:
        """Set up a class, before the first of its tests."""
        if home not in self.ready:
            self.ready.add(home)
            self.hook(home, name)

    def hook(self, home: Any, name: str, *given: Any) -> None:
        """Call a function such as ``setup_method``, where there is one."""
        function = getattr(home, name, None)
        if function is not None:
            plain = getattr(function, "__func__", function)
            bound = plain is not function
            function(*given[: plain.__code__.co_argcount - bound])

    def cases_of(self, kind: Any) -> Iterator[Callable[[], None]]:
        """The tests of a ``unittest.TestCase``."""
        import unittest

        for name in unittest.TestLoader().getTestCaseNames(kind):
            yield partial(self.unittest_case, kind, name)

    def unittest_case(self, kind: Any, name: str) -> None:
        """Run one test of unittest; the first thing that went wrong in it is raised."""
        import unittest

        self.once(kind, "setUpClass")
        errors: list[BaseException] = []

        class Result(unittest.TestResult):
            def addError(self, test: Any, err: Any) -> None:  # noqa: N802 - unittest's
                errors.append(err[1])

            def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
                errors.append(err[1])

            def addSubTest(self, *about: Any) -> None:  # noqa: N802
                errors.extend([about[2][1]] if about[2] is not None else [])

            def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
                errors.append(SkippedError(reason))

        kind(name).run(Result())
        if errors:
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])


def _members(home: Any) -> dict[str, Any]:
    """The members of a module or class, base classes first, with decorators unwrapped."""
    if not isinstance(home, type):
        return dict(vars(home))
    found = {n: v for base in reversed(home.__mro__[:-1]) for n, v in vars(base).items()}
    return {n: getattr(v, "__func__", v) for n, v in found.items()}


def _owns(home: type, function: Any) -> bool:
    return any(value is function for value in _members(home).values())


def _is_static(home: type, function: Any) -> bool:
    return any(
        isinstance(value, staticmethod) and value.__func__ is function
        for base in home.__mro__
        for value in vars(base).values()
    )


def _is_test_case(kind: type) -> bool:
    module = sys.modules.get("unittest.case")
    return module is not None and issubclass(kind, module.TestCase)


def _wanted(function: Any, home: Any) -> list[str]:
    """The parameters of a test that have no default, without ``self``."""
    code, optional = function.__code__, function.__kwdefaults__ or ()
    names = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    by_name = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    of_class = isinstance(home, type) and not _is_static(home, function)
    return [*names[of_class:], *(name for name in by_name if name not in optional)]


def _row(names: list[str], row: Any) -> tuple[dict[str, Any], tuple[Mark, ...]]:
    values = row if isinstance(row, Values) or len(names) > 1 else (row,)
    marks = row.marks if isinstance(row, Values) else ()
    if len(values) != len(names):
        raise ValueError(f"parametrize: {len(values)} values for {', '.join(names)}")
    return dict(zip(names, values)), marks  # noqa: B905 - as long as each other


def _is_skipped(mark: Mark) -> bool:
    if mark.name == "skipif" and mark.args and isinstance(mark.args[0], str):
        raise BrokenTestsError("the tests use pytest.mark.skipif with text: not supported")
    return mark.name == "skip" or (mark.name == "skipif" and bool(mark.args and mark.args[0]))


def _finish(value: Any) -> Any:
    """Wait for an ``async def``."""
    if not isinstance(value, types.CoroutineType):
        return value
    import asyncio

    return asyncio.run(value)


class _Refusing:
    """Refuses imports that cannot work, because the solution runs in another process."""

    def find_spec(self, name: str, *others: Any) -> None:
        """Asked before every import."""
        if name == "unittest.mock":
            raise BrokenTestsError("the tests use unittest.mock, which is not supported")


def _count_assertions(examiner: Examiner) -> None:
    import unittest

    def counted(method: Any) -> Any:
        def wrapper(*args: Any, **named: Any) -> Any:
            examiner.asserted()
            return method(*args, **named)

        return wrapper

    for name in [name for name in dir(unittest.TestCase) if name.startswith("assert")]:
        setattr(unittest.TestCase, name, counted(getattr(unittest.TestCase, name)))
    unittest.main = lambda *args, **named: None  # type: ignore[assignment]


def run_collected(examiner: Examiner, module: types.ModuleType, *, task: dict[str, Any]) -> None:
    """Load tests, then run the functions and classes that pytest would."""
    sys.modules["pytest"] = Pytest(examiner)
    sys.meta_path.insert(0, _Refusing())
    if "unittest" in task["tests"]:
        _count_assertions(examiner)
    load_text(task["tests"], module)
    Runner(examiner, module, task=task).run()


def run_doctest(examiner: Examiner, module: types.ModuleType, *, task: dict[str, Any]) -> None:
    """Run the examples of a text; each that shows an output is a case."""
    import doctest

    class Reporting(doctest.DocTestRunner):
        def report_start(self, *about: Any) -> None:
            pass

        def report_success(self, *about: Any) -> None:
            if about[2].want:
                examiner.case(examiner.num_asserted)
                examiner.asserted()

        def report_failure(self, *about: Any) -> None:
            _, _, example, got = about
            error = AssertionError(f"expected {example.want.strip()}, got {got.strip()}")
            examiner.case(examiner.num_asserted, error)
            examiner.asserted()

        def report_unexpected_exception(self, *about: Any) -> None:
            error = about[3][1]
            if not isinstance(error, Exception | NotDefinedError):
                raise error
            examiner.case(examiner.num_asserted, error)
            examiner.asserted()

    sys.modules["solution"] = module  # holds the stand-ins for what the examples use
    examples = doctest.DocTestParser().get_examples(task["tests"])
    examiner.report.send({"cases": sum(bool(example.want) for example in examples)})
    test = doctest.DocTest(examples, vars(module), "tests", None, 0, task["tests"])
    Reporting(verbose=False).run(test, clear_globs=False)


RUNNERS = {"collected": run_collected, "doctest": run_doctest}
