"""Runs inside a sandbox, with the model's code: answers calls, and knows nothing of the tests."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import operator
import os
import resource
import sys
import types

from posttrain.sandbox.wire import Channel, decode, encode, load_text

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READY = b"ready\n"
MAX_MESSAGE_LENGTH = 200
MAX_PRINTED = 16_384  # characters that are kept of what one call prints, for tests that read it
END = object()


def set_limits(limits: dict[str, int]) -> None:
    """Bind this process, for good: each limit is both soft and hard."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def take_text(descriptor: int) -> str:
    """The text behind a descriptor, which is closed."""
    with os.fdopen(descriptor, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def silence(*descriptors: int) -> None:
    """Redirect descriptors to /dev/null: nobody reads them, and a full pipe would block."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


class Printed(io.StringIO):
    """Standard output: what is printed beyond a limit is lost."""

    def write(self, text: str) -> int:
        """Keep a text, or its beginning, or nothing of it."""
        return super().write(text[: max(0, MAX_PRINTED - self.tell())])

    def take(self) -> str:
        """What was printed since the last time."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class Worker:
    """Answers the examiner's requests about one module, until the line is cut.

    What is no plain data stays here, and a number stands for it. ``whole`` in a request asks for
    that also where the object is of a class of the solution's own that extends a plain one.
    """

    def __init__(self, line: Channel) -> None:
        self.line = line
        self.module = types.ModuleType("solution")
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.output = sys.stdout = Printed()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for; whatever is raised is an answer too."""
        try:
            return getattr(self, "do_" + request["do"])(request)
        except BaseException as error:  # noqa: BLE001 - SystemExit as well: it is the model's code
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": kinds, "message": describe(error), **self.details(error)}

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the solution; where it asks for input, what it has defined until then counts."""
        sys.modules["solution"] = self.module
        with contextlib.suppress(EOFError):
            load_text(request["text"], self.module)
        return {}

    def do_names(self, request: dict[str, Any]) -> dict[str, Any]:
        """The values of the requested names that the solution defines."""
        held = vars(self.module)
        return {"names": [[n, encode(held[n], self.keep)] for n in request["names"] if n in held]}

    def do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the module, or a method of an object that was returned before."""
        args = [decode(item, self.find) for item in request["args"]]
        named = {key: decode(item, self.find) for key, item in request["named"].items()}
        value = self.objects[request["number"]](*args, **named)
        if value is not None:
            return {"value": self.encoded(value, request)}
        # A function that returns nothing works in place, and the tests must see what it did. One
        # that returns a value has no business there: emptying the list that a test is about to
        # sort and compare with is a way to cheat.
        changed = [
            [place, encode(value, self.keep)]
            for place, value in enumerate(args)
            if isinstance(value, list | dict | set | bytearray)
        ]
        return {"value": None, "changed": changed}

    def do_get(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read an attribute that the object has; with ``whole``, one that it makes up as well."""
        target, name = self.objects[request["number"]], request["name"]
        read = type.__getattribute__ if isinstance(target, type) else object.__getattribute__
        try:
            value = read(target, name)
        except AttributeError:
            if not request["whole"] or says_yes(getattr, target, "x" + os.urandom(4).hex()):
                raise
            value = getattr(target, name)
        return {"value": self.encoded(value, request)}

    def do_set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Set an attribute."""
        value = decode(request["value"], self.find)
        setattr(self.objects[request["number"]], request["name"], value)
        return {}

    def do_operate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Apply a built-in function, an operator, or a special method such as ``__enter__``."""
        name, values = request["name"], [decode(item, self.find) for item in request["args"]]
        # Without the method, `in` would iterate over the object and use up an iterator.
        asked = name == "eq" or (name == "contains" and hasattr(type(values[0]), "__contains__"))
        if asked and says_yes(getattr(operator, name), values[0], object()):
            raise TypeError(f"the object says yes to every {name}")
        if name.startswith("__"):
            value = getattr(type(values[0]), name)(*values)
        else:
            value = (getattr(builtins, name, None) or getattr(operator, name))(*values)
        return {"value": self.encoded(value, request)}

    def do_next(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next item of an iterator, or its end."""
        value = next(self.objects[request["number"]], END)
        return {"end": True} if value is END else {"value": self.encoded(value, request)}

    def do_wait(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a coroutine to its end."""
        import asyncio

        if not hasattr(self, "loop"):  # one loop for all calls: queues and locks belong to a loop
            self.loop = asyncio.new_event_loop()
        value = self.loop.run_until_complete(self.objects[request["number"]])
        return {"value": self.encoded(value, request)}

    def do_content(self, request: dict[str, Any]) -> dict[str, Any]:
        """An object of a class that extends a plain one, as the plain one."""
        return {"value": encode(self.objects[request["number"]], self.keep)}

    def encoded(self, value: Any, request: dict[str, Any]) -> Any:
        """A value encoded for the other process."""
        if request.get("whole") and type(value).__module__ == self.module.__name__:
            return self.keep(value)
        return encode(value, self.keep)

    def find(self, content: dict[str, Any]) -> Any:
        """What a handle stands for."""
        name = content.get("builtin")
        return getattr(builtins, name) if name else self.objects[content["number"]]

    def keep(self, value: Any) -> dict[str, Any]:
        """Keep an object here, and let a number stand for it: the same for the same object."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        content: dict[str, Any] = {"number": number}
        if isinstance(value, types.CoroutineType):
            content["waits"] = True
        elif isinstance(value, type) and issubclass(value, BaseException):
            content["raises"] = [kind.__name__ for kind in value.__mro__]
        return {"handle": content}

    def details(self, error: BaseException) -> dict[str, Any]:
        """What an exception holds, where that is plain data."""
        try:
            state = {n: encode(v) for n, v in vars(error).items() if not n.startswith("_")}
            return {"args": [encode(item) for item in error.args], "state": state}
        except BaseException:  # noqa: BLE001 - the model's objects may raise anything here
            return {}


def says_yes(ask: Callable[..., Any], *values: Any) -> bool:
    """Whether an object says yes, or anything, to a question that no honest one says yes to."""
    try:
        return ask(*values) is not False
    except Exception:  # noqa: BLE001 - raising is no answer
        return False


def describe(error: BaseException) -> str:
    """What an exception says, where it can say it."""
    try:
        return str(error)[:MAX_MESSAGE_LENGTH]
    except BaseException:  # noqa: BLE001 - the model's class may raise anything here
        return ""


def serve(request: int, reply: int) -> None:
    """Answer calls over a pair of pipes; what the code prints is part of the answer."""
    line = Channel(request, reply, max_bytes=2**40)
    line.sink.write(READY)
    line.sink.flush()
    silence(0, 1, 2)
    worker = Worker(line)
    while True:
        try:
            asked = line.receive()
        except EOFError:
            os._exit(0)  # exit without waiting for threads that still run
        answer = worker.answer(asked)
        printed = worker.output.take()
        line.send({**answer, "printed": printed} if printed else answer)


def run_program(source: int, status: int) -> None:
    """Run a whole program with the given standard input and output."""
    text = take_text(source)
    os.write(status, READY)
    os.close(status)
    silence(2)
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    sys.argv = ["solution.py"]
    load_text(text, program)


def main() -> None:
    """``worker.py LIMITS serve|program FD FD``."""
    set_limits(json.loads(sys.argv[1]))
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # site, which defines them, is not loaded
    role = {"serve": serve, "program": run_program}[sys.argv[2]]
    role(int(sys.argv[3]), int(sys.argv[4]))
