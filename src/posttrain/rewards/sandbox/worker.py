"""Runs inside a sandbox, with the model's code: answers calls, and knows nothing of the tests."""

from __future__ import annotations

import json
import os
import resource
import sys
import types

from posttrain.rewards.sandbox.wire import Line, decode, encode, load_text

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any

READY = b"ready\n"
MAX_MESSAGE_LENGTH = 200


def set_limits(limits: dict[str, int]) -> None:
    """Bind this process, for good: each limit is both soft and hard."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def take_text(descriptor: int) -> str:
    """The text behind a descriptor, which is closed."""
    with os.fdopen(descriptor, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def silence(*descriptors: int) -> None:
    """Let what is written to these go nowhere: nobody reads it, and a full pipe would block."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


class Worker:
    """Answers the examiner's requests about one module, until the line is cut."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.module = types.ModuleType("solution")
        self.objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for; whatever is raised is an answer too."""
        try:
            return getattr(self, "do_" + request["do"])(request)
        except BaseException as error:  # noqa: BLE001 - SystemExit as well: it is the model's code
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": kinds, "message": describe(error)}

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the solution and say which functions and classes it defines."""
        sys.modules["solution"] = self.module
        load_text(request["text"], self.module)
        return {"names": [name for name, value in vars(self.module).items() if callable(value)]}

    def do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the module, or a method of an object that was returned before."""
        target = self.find(request.get("handle"))
        function = target if request["name"] is None else getattr(target, request["name"])
        args = [decode(item, self.find) for item in request["args"]]
        named = {key: decode(item, self.find) for key, item in request["named"].items()}
        value = function(*args, **named)
        if value is not None:
            return {"value": encode(value, self.keep)}
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
        """Read an attribute of an object that was returned before."""
        return {"value": encode(getattr(self.find(request["handle"]), request["name"]), self.keep)}

    def find(self, handle: Any) -> Any:
        """What a handle stands for; None for the module."""
        return self.module if handle is None else self.objects[handle]

    def keep(self, value: Any) -> dict[str, int]:
        """Keep an object here, and let a number stand for it."""
        self.objects.append(value)
        return {"handle": len(self.objects) - 1}


def describe(error: BaseException) -> str:
    """What an exception says, where it can say it."""
    try:
        return str(error)[:MAX_MESSAGE_LENGTH]
    except BaseException:  # noqa: BLE001 - the model's class may raise anything here
        return ""


def serve(request: int, reply: int) -> None:
    """Answer calls over a pair of pipes; what the code prints goes nowhere."""
    line = Line(request, reply, max_bytes=2**40)
    line.sink.write(READY)
    line.sink.flush()
    silence(0, 1, 2)
    worker = Worker(line)
    while True:
        try:
            asked = line.receive()
        except EOFError:
            os._exit(0)  # threads that were left running do not hold us up
        line.send(worker.answer(asked))


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
    role = {"serve": serve, "program": run_program}[sys.argv[2]]
    role(int(sys.argv[3]), int(sys.argv[4]))
