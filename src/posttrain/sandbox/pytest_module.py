"""The module ``pytest`` in the examiner's sandbox: the part of its API that tests mostly use.

A test that uses anything else is invalid, with its name in the reason: none is silently skipped.
"""

from __future__ import annotations

import io
import re
import sys
import types
from collections import namedtuple
from numbers import Number

from posttrain.sandbox.examiner import BrokenTestsError, SkippedError, StopExamining

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any

    from posttrain.sandbox.examiner import Examiner

UNSUPPORTED_MARKS = frozenset({"xfail", "usefixtures"})


class Raises:
    """``with raises(ValueError, match="odd") as caught:``."""

    def __init__(self, examiner: Examiner, kind: Any, *, match: str | None) -> None:
        self.examiner, self.kind, self.pattern = examiner, kind, match
        self.value: Any = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.examiner.asserted()
        if error is None:
            raise AssertionError(f"did not raise {self.kind}")
        ours = isinstance(error, BrokenTestsError | StopExamining)
        if ours or not isinstance(error, self.kind):
            return False
        self.value = error
        return self.pattern is None or self.match(self.pattern)

    @property
    def type(self) -> Any:
        """The class of what was raised."""
        return type(self.value)

    def match(self, pattern: str) -> bool:
        """Whether what was raised says this."""
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern!r} does not match {str(self.value)!r}")
        return True


class Approx:
    """Equal to numbers within ``max(rel · |expected|, abs)``, item by item in lists and dicts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, *tolerances: Any, **named: Any) -> None:
        options = dict(zip(("rel", "abs", "nan_ok"), tolerances), **named)  # noqa: B905
        self.expected, self.nan_ok = expected, options.get("nan_ok", False)
        self.rel, self.abs = options.get("rel"), options.get("abs")

    def __eq__(self, actual: object) -> bool:
        return self._equal(self.expected, actual)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _equal(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(actual, dict) and expected.keys() == actual.keys()
            return same and all(self._equal(expected[key], actual[key]) for key in expected)
        if isinstance(expected, list | tuple):
            same = isinstance(actual, list | tuple) and len(expected) == len(actual)
            return same and all(map(self._equal, expected, actual))
        numbers = isinstance(expected, Number) and isinstance(actual, Number)
        if not numbers or isinstance(expected, bool) or isinstance(actual, bool):
            return type(actual) is type(expected) and bool(actual == expected)
        return bool(expected == actual) or self._close(expected, actual)

    def _close(self, expected: Any, actual: Any) -> bool:
        if expected != expected or actual != actual:
            return self.nan_ok and expected != expected and actual != actual
        relative = 1e-6 if self.rel is None and self.abs is None else float(self.rel or 0)
        absolute = 1e-12 if self.abs is None else float(self.abs)
        try:
            allowed = max(relative * abs(complex(expected)), absolute)
            return abs(complex(expected) - complex(actual)) <= allowed < float("inf")
        except (OverflowError, TypeError):
            return False


class MarkGenerator:
    """``pytest.mark``: what changes which tests are run; other marks are only names."""

    def __getattr__(self, name: str) -> Any:
        if name in UNSUPPORTED_MARKS:
            raise BrokenTestsError(f"the tests use pytest.mark.{name}, which is not supported")
        return Mark(name, (), named={})


class Mark:
    """A decorator that notes itself on a test."""

    def __init__(self, name: str, args: tuple[Any, ...], *, named: dict[str, Any]) -> None:
        self.name, self.args, self.named = name, args, named

    def __call__(self, *args: Any, **named: Any) -> Any:
        bare = len(args) == 1 and not named and isinstance(args[0], type | types.FunctionType)
        if not bare:
            return Mark(self.name, args, named=named)
        args[0].__marks__ = [self, *getattr(args[0], "__marks__", [])]
        return args[0]


class Values(tuple):
    """One row of ``parametrize`` with marks of its own: ``pytest.param``."""

    marks: tuple[Mark, ...] = ()


CaptureResult = namedtuple("CaptureResult", "out err")


class Capture:
    """The fixture ``capsys``: what is printed while a test runs."""

    def __init__(self) -> None:
        self.out = sys.stdout = io.StringIO()

    def readouterr(self) -> Any:
        """What was printed since the last time; standard error is not kept."""
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return CaptureResult(text, Unknown())


class Unknown:
    """The standard error of the solution, which is not kept: comparing it makes tests invalid."""

    def __eq__(self, other: object) -> bool:
        raise BrokenTestsError("the tests look at standard error, which is not supported")

    __hash__ = None  # type: ignore[assignment]
    __contains__ = __eq__


class Pytest(types.ModuleType):
    """The module ``pytest``, as far as it goes."""

    def __init__(self, examiner: Examiner) -> None:
        super().__init__("pytest")
        self.mark = MarkGenerator()
        self.approx = Approx
        self.main = lambda *args, **named: 0  # pytest.main does nothing: the tests run anyway
        self.fixture = _fixture
        self.param = _param
        self.fail = _fail
        self.skip = _skip
        self._examiner = examiner

    def raises(self, kind: Any, *args: Any, match: str | None = None, **named: Any) -> Any:
        """A context that must be left by an exception; with a function, its call must raise."""
        expected = Raises(self._examiner, kind, match=match)
        if args:
            with expected:
                args[0](*args[1:], **named)
        return expected

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BrokenTestsError(f"the tests use pytest.{name}, which is not supported")


def _fixture(
    function: Any = None, *, scope: str = "function", autouse: bool = False, **more: Any
) -> Any:
    if more.keys() - {"name"}:
        unsupported = ", ".join(sorted(more.keys() - {"name"}))
        raise BrokenTestsError(f"the tests use {unsupported} of pytest.fixture: not supported")

    def mark(given: Any) -> Any:
        given.__fixture__ = {"scope": scope, "autouse": autouse, "name": more.get("name")}
        return given

    return mark if function is None else mark(function)


def _param(*values: Any, marks: Any = (), id: Any = None) -> Values:
    row = Values(values)
    row.marks = tuple(marks) if isinstance(marks, list | tuple) else (marks,)
    return row


def _fail(reason: str = "", pytrace: bool = True) -> None:
    raise AssertionError(reason)


def _skip(reason: str = "", **named: Any) -> None:
    raise SkippedError(reason)
