"""Runs inside a sandbox of its own, with the tests: calls the solution, which lives in another.

``Remote`` objects stand in for the solution's functions: they send plain data and get plain data
back. Every comparison happens here, on built-in types, out of the solution's reach.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator
from itertools import islice

from posttrain.sandbox.remote import Absent, NotDefinedError, Remote
from posttrain.sandbox.wire import Channel, NotPlainError, decode, encode, load_text
from posttrain.sandbox.worker import MAX_MESSAGE_LENGTH, READY, set_limits, take_text

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any

MAX_ITEMS = 10_000  # items of an iterator that a test passes: it is sent as a list
NO_CASE = -1  # instead of a case's index, for an error between two cases
# Raised by a solution inside a test's map() or generator, these would end a loop of tests early.
NEVER_PASSED_ON = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class BrokenTestsError(BaseException):
    """The tests cannot run on any solution; a BaseException, so that no test swallows it."""


class StopExamining(BaseException):
    """A case failed, and the first failure ends the examination."""


class SkippedError(Exception):
    """A test that says it is not to be run."""


class SolutionExitError(SystemExit, Exception):
    """The solution called ``sys.exit``; the tests see an ordinary exception."""


SolutionExitError.__name__ = "SystemExit"  # the name that reports show


class Examiner:
    """Runs the tests against the solution in the other process, and reports case by case."""

    def __init__(self, line: Channel, report: Channel) -> None:
        self.line = line
        self.report = report
        self.blameless = True  # no call yet: until the first one, an error is the tests' own
        self.num_asked = 0
        self.num_asserted = 0
        self.skipped_over = False  # a case asked the solution, and reached none of its assertions
        self.failed = False
        self.missing = ""  # a name that the solution does not define, or how its process ended
        self.stop_early = True
        self.classes: frozenset[str] = frozenset()  # classes whose objects are under test
        self.stand_ins: dict[int, Remote] = {}
        self.under_test: set[int] = set()
        self.makes_objects: set[int] = set()
        self.differences: set[int] = set()  # objects that come of taking away plain data
        self.exceptions: dict[str, type[Exception]] = {}
        self.others: dict[int, tuple[Any, int]] = {}  # other stand-ins, by id of the object

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the solution; raise here what it raised there."""
        self.blameless = False
        self.num_asked += 1
        try:
            self.line.send(request)
            reply = self.line.receive()
        except EOFError as error:
            # The solution may still be writing an answer, which must not be read as the next one.
            self.line.source.close()
            self.missing = f"the solution's process: {error}"
            raise NotDefinedError(self.missing) from None
        except (OSError, ValueError) as error:
            self.missing = f"the solution's process ended ({error})"
            raise NotDefinedError(self.missing) from None
        if "printed" in reply:
            sys.stdout.write(str(reply["printed"]))
        if "raised" in reply:
            raise self.raised(reply)
        return reply

    def raised(self, reply: dict[str, Any]) -> Exception:
        """An exception like the one that the solution raised, with its arguments and attributes."""
        kinds, message = list(map(str, reply["raised"])), str(reply.get("message"))
        args = [decode(item) for item in reply.get("args", [])]
        if "SystemExit" in kinds:
            return SolutionExitError(*args)
        error: Exception = RuntimeError(f"{kinds[0]}: {message}")
        if not NEVER_PASSED_ON.isdisjoint(kinds) or "Exception" not in kinds:
            return error
        # Some exceptions need certain arguments, such as UnicodeDecodeError.
        with contextlib.suppress(TypeError):
            error = self.exception(kinds)(*args)
        error.__message__ = message  # type: ignore[attr-defined]
        for name, value in reply.get("state", {}).items():
            setattr(error, name, decode(value))
        return error

    def exception(self, kinds: list[str]) -> type[Exception]:
        """The built-in class of a name, or one of ours for a class of the solution's."""
        base: type[Exception] = Exception
        for name in reversed(kinds):
            known = getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                base = known
            elif known is None and name not in self.exceptions:
                self.exceptions[name] = type(name, (base,), {"__str__": _message})
            base = self.exceptions.get(name, base)
        return base

    def sent(self, value: Any) -> Any:
        """An argument of a test, encoded for the other process."""
        try:
            return encode(value, self.handle)
        except NotPlainError as error:
            raise BrokenTestsError(
                f"a test passes something other than plain data to the solution: {error}. Numbers, "
                "strings, bytes, None, lists, tuples, dicts, sets, dates, fractions, decimals, "
                "built-in functions and objects of the solution's own can be passed"
            ) from None

    def handle(self, value: Any) -> dict[str, Any]:
        """A handle that is sent instead of an object that is no plain data."""
        if type(value) is Remote:
            return {"handle": {"number": value.__number__}}
        if id(value) in self.others:
            return {"handle": {"number": self.others[id(value)][1]}}
        if isinstance(value, Absent):
            value()
        name = str(getattr(value, "__name__", ""))
        if getattr(builtins, name, None) is value:  # len, str
            return {"handle": {"builtin": name}}
        if isinstance(value, Iterator):
            return {"iterator": [encode(item, self.handle) for item in islice(value, MAX_ITEMS)]}
        raise NotPlainError(f"a {type(value).__name__}")

    def call(self, target: Remote, *, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the solution with copies; one that returns None worked in place."""
        data = [self.sent(value) for value in args]
        by_name = {key: self.sent(value) for key, value in named.items()}
        makes = target.__number__ in self.makes_objects
        reply = self.ask(
            {"do": "call", "number": target.__number__, "args": data, "named": by_name}
            | {"whole": makes}
        )
        if reply["value"] is None:
            for place, content in reply["changed"]:
                _replace(args[place], self.value(content))
        value = self.value(reply["value"])
        if makes and type(value) is Remote:
            self.under_test.add(value.__number__)
        return value

    def of(self, target: Remote, **request: Any) -> Any:
        """Send a request about one object of the solution's."""
        whole = self.is_under_test(target)
        reply = self.ask({"number": target.__number__, "whole": whole, **request})
        return self.value(reply.get("value"))

    def next(self, target: Remote) -> Any:
        """The next item of an iterator."""
        reply = self.ask({"do": "next", "number": target.__number__})
        if "end" in reply:
            raise StopIteration
        return self.value(reply["value"])

    def is_under_test(self, target: Remote) -> bool:
        """Whether the tests treat it as an object with behaviour of its own."""
        return target.__number__ in self.under_test

    def operate(self, name: str, *values: Any, gives: type | None = None) -> Any:
        """Have the solution's process apply an operation; the answer must be of a plain type."""
        data = [self.sent(value) for value in values]
        value = self.value(self.ask({"do": "operate", "name": name, "args": data})["value"])
        if gives is not None and type(value) is not gives:
            raise TypeError(f"the solution's object gave no {gives.__name__} for {name}")
        return value

    def question(self, name: str, *values: Any, gives: type | None = None) -> Any:
        """Ask an object under test about itself."""
        if not self.is_under_test(values[0]):
            raise TypeError(
                f"the solution's object is not asked for {name.strip('_')}: it is of no class that "
                "the tests name; return plain data"
            )
        return self.operate(name, *values, gives=gives)

    def combine(self, name: str, *values: Any) -> Any:
        """Arithmetic with objects under test; with plain data, the result is another object.

        So is the size of a difference from plain data: ``abs(x - 4) < 1e-6`` would take any word.
        """
        objects = [value for value in values if type(value) is Remote]
        if not any(map(self.is_under_test, objects)):
            raise TypeError(f"the solution's object is not asked for {name.strip('_')}")
        value = self.operate(name, *values)
        mixed = len(objects) < len(values)
        differs = mixed and name in ("sub", "isub")
        differs |= any(each.__number__ in self.differences for each in objects)
        if type(value) is Remote:
            self.under_test.add(value.__number__)
            self.differences |= {value.__number__} if differs else set()
        elif mixed or (differs and name == "abs"):
            raise TypeError(f"the solution's object gave plain data for {name.strip('_')}")
        return value

    def value(self, data: Any) -> Any:
        """A value from the solution: built-in types, or a stand-in for an object that it keeps."""
        return decode(data, self.stand_in)

    def stand_in(self, content: dict[str, Any]) -> Any:
        """The stand-in for an object of the solution's: always the same for the same object."""
        number = int(content["number"])
        if "waits" not in content and "raises" not in content:
            return self.stand_ins.setdefault(number, Remote(self, number))
        if "waits" in content:
            value: Any = self.awaited(number)
        else:
            value = self.exception(list(map(str, content["raises"])))
            if issubclass(AssertionError, value):
                raise TypeError(f"{value.__name__} would catch what the tests themselves raise")
        self.others[id(value)] = value, number
        return value

    async def awaited(self, number: int) -> Any:
        """A coroutine that awaits one of the solution's."""
        return self.value(self.ask({"do": "wait", "number": number})["value"])

    def asserted(self, value: Any = True) -> Any:
        """Count an assertion: tests that make none have tested nothing."""
        self.num_asserted += 1
        return value

    def case(self, number: int, error: BaseException | None = None) -> None:
        """Report one case, and what went wrong in it."""
        if error is not None and self.blameless and not isinstance(error, NotDefinedError):
            raise BrokenTestsError(f"the tests fail by themselves: {_say(error)}") from None
        self.failed = self.failed or error is not None
        self.report.send({"case": number, "passed": error is None, "why": _say(error)})
        if error is not None and self.stop_early:
            raise StopExamining

    def examine(self, task: dict[str, Any]) -> None:
        """Load the solution, then run the tests, which were rewritten to report their cases."""
        self.stop_early, self.classes = task["stop_early"], frozenset(task["classes"])
        module = types.ModuleType("__main__" if task["style"] == "script" else "tests")
        try:
            self.ask({"do": "load", "text": task["solution"]})
            self.name(module, task["names"])
        except (Exception, NotDefinedError) as error:  # noqa: BLE001 - it does not load: wrong
            self.case(NO_CASE, error)
            return
        sys.modules[module.__name__] = module
        vars(module).update(__case__=lambda number: Case(self, number), __asserted__=self.asserted)
        try:
            if task["style"] == "script":
                load_text(task["tests"], module)
            else:
                from posttrain.sandbox import collected

                collected.RUNNERS[task["style"]](self, module, task=task)
        except (Exception, NotDefinedError) as error:  # noqa: BLE001 - between two cases: it ends
            self.case(NO_CASE, error)
        except SystemExit:
            raise BrokenTestsError("the tests end their own process (SystemExit)") from None

    def name(self, module: types.ModuleType, names: list[str]) -> None:
        """Give the tests what they want of the solution, by name."""
        held = self.ask({"do": "names", "names": names})["names"]
        found = {name: self.value(value) for name, value in held}
        self.num_asked = 0
        self.blameless = True
        for name in names:
            value = found.get(name, Absent(self, name))
            setattr(module, name, value)
            if type(value) is Remote and name in self.classes:
                self.makes_objects.add(value.__number__)
                self.under_test.add(value.__number__)
            elif type(value) is not Remote:  # a value: using it is no call of the solution
                self.blameless = False
                self.num_asked += name in found

    def conclude(self) -> None:
        """Tests that passed must have tested something, and swallowed no error about a name."""
        if self.missing and not self.failed:
            self.case(NO_CASE, NotDefinedError(self.missing))
        if self.failed:
            return
        if not self.num_asked:
            raise BrokenTestsError("the tests never call the solution")
        if self.skipped_over and not self.num_asserted:
            self.case(NO_CASE, AssertionError("what it gave let no assertion be reached"))
        elif not self.num_asserted:
            raise BrokenTestsError("the tests execute no assertion")


class Case:
    """``with __case__(number):`` around a statement of the tests reports how it ended."""

    def __init__(self, examiner: Examiner, number: int, *, asserts: bool = True) -> None:
        self.examiner = examiner
        self.number = number
        self.asserts = asserts  # whether the statement holds an assertion

    def __enter__(self) -> None:
        self.before = self.examiner.num_asserted, self.examiner.num_asked

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        asserted = self.examiner.num_asserted > self.before[0]
        asked = self.examiner.num_asked > self.before[1]
        self.examiner.skipped_over |= self.asserts and asked and not asserted and error is None
        if isinstance(error, SkippedError) or (error is None and not asserted):
            return True  # no assertion ran, so the case has not passed
        if error is not None and not isinstance(error, Exception | NotDefinedError):
            return False
        self.examiner.case(self.number, error)
        return True


def _message(error: Exception) -> str:
    return str(getattr(error, "__message__", "")) or Exception.__str__(error)


def _replace(old: Any, new: Any) -> None:
    """Give an argument that was changed in place its new content."""
    if type(old) is not type(new):
        raise RuntimeError("the solution's process: the argument changed its type")
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


def _say(error: BaseException | None) -> str:
    if error is None:
        return ""
    text = str(error)[:MAX_MESSAGE_LENGTH]
    if isinstance(error, NotDefinedError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> None:
    """``examiner.py LIMITS TASK_FD REQUEST_FD REPLY_FD REPORT_FD``."""
    set_limits(json.loads(sys.argv[1]))
    task_fd, request, reply, verdicts = map(int, sys.argv[2:6])
    task = json.loads(take_text(task_fd))
    line = Channel(reply, request, max_bytes=task["max_bytes"])
    report = Channel(os.open(os.devnull, os.O_RDONLY), verdicts, max_bytes=0)
    if line.source.readline(len(READY)) != READY:
        sys.exit("the solution's sandbox did not start")
    report.send({"ready": True})
    examiner = Examiner(line, report)
    try:
        examiner.examine(task)
        examiner.conclude()
    except StopExamining:
        pass
    except BrokenTestsError as error:
        report.send({"broken": str(error)})
        return
    report.send({"done": True, "asked": examiner.num_asked > 0})
