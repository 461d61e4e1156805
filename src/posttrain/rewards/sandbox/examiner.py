"""Runs inside a sandbox of its own, with the tests: calls the solution, which lives in another.

The solution's functions are stood in for by ``Remote`` objects, which send plain data and get plain
data back. Every comparison happens here, on built-in types, where the solution cannot reach.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator

from posttrain.rewards.sandbox.wire import Line, NotPlainError, decode, encode, load_text
from posttrain.rewards.sandbox.worker import MAX_MESSAGE_LENGTH, READY, set_limits, take_text

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Raised by a solution inside a test's map() or generator, these would end a loop of tests early.
NEVER_PASSED_ON = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class BrokenTestsError(BaseException):
    """The tests cannot be put to any solution; a BaseException, so that no test swallows it."""


class StopExamining(BaseException):
    """A case failed, and one is enough."""


class Examiner:
    """Puts the tests to the solution at the other end of a line, and reports case by case."""

    def __init__(self, line: Line, report: Line) -> None:
        self.line = line
        self.report = report
        self.asked = False  # before the first call, an error is the tests' own
        self.stop_early = True

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the solution; raise here what it raised there."""
        self.asked = True
        try:
            self.line.send(request)
            reply = self.line.receive()
        except EOFError as error:
            # It may still be writing: what follows could be taken for another answer.
            self.line.source.close()
            raise RuntimeError(f"the solution's process: {error}") from None
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the solution's process ended ({error})") from None
        if "raised" in reply:
            raise self.raised(reply)
        return reply

    def raised(self, reply: dict[str, Any]) -> Exception:
        """An exception of the nearest built-in class to the one that the solution raised."""
        kinds, message = list(map(str, reply["raised"])), str(reply.get("message"))
        if not NEVER_PASSED_ON.isdisjoint(kinds):
            return RuntimeError(f"{kinds[0]}: {message}")
        for name in kinds:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                with contextlib.suppress(TypeError):  # a UnicodeDecodeError takes five arguments
                    return kind(message)
        return RuntimeError(f"{kinds[0]}: {message}")

    def call(self, target: Remote, *, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the solution with copies; one that returns None worked in place."""
        try:
            data = [encode(value, _handle) for value in args]
            by_name = {key: encode(value, _handle) for key, value in named.items()}
        except NotPlainError as error:
            raise BrokenTestsError(
                f"a test passes something other than plain data to the solution: {error}. Numbers, "
                "strings, bytes, None, lists, tuples, dicts, sets and objects of the solution's "
                "own can be passed"
            ) from None
        about = {"handle": target._handle, "name": target._name}
        reply = self.ask({"do": "call", "args": data, "named": by_name, **about})
        if reply["value"] is None:
            for place, content in reply["changed"]:
                _replace(args[place], self.value(content))
        return self.value(reply["value"])

    def value(self, data: Any) -> Any:
        """What the solution sent: built-in types, or a stand-in for an object it keeps."""
        return decode(data, lambda handle: Remote(self, int(handle), name=None))

    def case(self, error: Exception | None = None) -> None:
        """Report one case, and what went wrong in it."""
        if error is not None and not self.asked and not isinstance(error, NameError):
            raise BrokenTestsError(f"the tests fail by themselves: {_say(error)}") from None
        self.report.send({"passed": error is None, "why": _say(error)})
        if error is not None and self.stop_early:
            raise StopExamining

    def examine(self, task: dict[str, Any]) -> None:
        """Load the solution, then run the tests, which were rewritten to report their cases."""
        self.stop_early = task["stop_early"]
        try:
            offered = set(self.ask({"do": "load", "text": task["solution"]})["names"])
        except Exception as error:  # noqa: BLE001 - a solution that does not load is wrong
            self.case(error)
            return
        module = types.ModuleType("tests")
        for name in offered & set(task["names"]):
            setattr(module, name, Remote(self, None, name=name))
        vars(module)["__case__"] = Case(self)
        self.asked = False
        try:
            load_text(task["tests"], module)
        except Exception as error:  # noqa: BLE001 - between two cases: what follows cannot run
            self.case(error)


class Case:
    """``with __case__:`` around a statement of the tests reports how it ended."""

    def __init__(self, examiner: Examiner) -> None:
        self.examiner = examiner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        self.examiner.case(error)
        return True


class Remote:
    """Stands for a function, class or object of the solution.

    It is equal to itself alone, and has no truth value: what the solution's own ``__eq__`` or
    ``__bool__`` would say is not asked. Attributes with a leading underscore are not passed on.
    """

    def __init__(self, examiner: Examiner, handle: int | None, *, name: str | None) -> None:
        self._examiner, self._handle, self._name = examiner, handle, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._examiner.call(self, args=args, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._handle is None:
            raise AttributeError(f"the solution's object has no attribute {name!r} for tests")
        reply = self._examiner.ask({"do": "get", "handle": self._handle, "name": name})
        return self._examiner.value(reply["value"])

    def _method(self, name: str, *args: Any) -> Any:
        target = Remote(self._examiner, self._handle, name=name)
        return self._examiner.call(target, args=args, named={})

    def __len__(self) -> int:
        return int(self._method("__len__"))

    def __getitem__(self, key: Any) -> Any:
        return self._method("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._method("__setitem__", key, value)

    def __contains__(self, key: Any) -> bool:
        return self._method("__contains__", key) is True

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._method("__iter__")))

    def __str__(self) -> str:
        return str(self._method("__str__")) if self._handle is not None else f"<{self._name}>"

    def __repr__(self) -> str:
        return str(self._method("__repr__")) if self._handle is not None else f"<{self._name}>"

    def __bool__(self) -> NoReturn:
        raise TypeError("an object of the solution is neither true nor false; return True or False")


def _handle(value: Any) -> dict[str, Any]:
    if isinstance(value, Remote) and value._handle is not None and value._name is None:
        return {"handle": value._handle}
    raise NotPlainError(f"a {type(value).__name__}")


def _replace(old: Any, new: Any) -> None:
    """Make a test's own object look as the call left the copy of it."""
    if type(old) is not type(new):
        raise RuntimeError("the solution's process: the argument changed its type")
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


def _say(error: Exception | None) -> str:
    if error is None:
        return ""
    text = str(error)[:MAX_MESSAGE_LENGTH]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> None:
    """``examiner.py LIMITS TASK_FD REQUEST_FD REPLY_FD REPORT_FD``."""
    set_limits(json.loads(sys.argv[1]))
    task_fd, request, reply, verdicts = map(int, sys.argv[2:6])
    task = json.loads(take_text(task_fd))
    line = Line(reply, request, max_bytes=task["max_bytes"])
    report = Line(os.open(os.devnull, os.O_RDONLY), verdicts, max_bytes=0)
    if line.source.readline(len(READY)) != READY:
        sys.exit("the solution's sandbox did not start")
    report.send({"ready": True})
    examiner = Examiner(line, report)
    try:
        examiner.examine(task)
        report.send({"done": True})
    except StopExamining:
        report.send({"done": True})
    except BrokenTestsError as error:
        report.send({"broken": str(error)})
