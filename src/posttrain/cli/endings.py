"""However a command ends, it says why, with an exit code that a shell understands.

A mistyped option is taken for no override, and messages escape what was typed.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from posttrain.track.printable import harmless
from posttrain.track.safe_terminal import say

_PACKAGE = Path(__file__).parents[1]
_MAX_IN_GROUP = 3
_WHAT_TO_DO: dict[type[BaseException], str] = {
    MemoryError: "there is not enough memory: take smaller batches, shorter texts or a smaller "
    "model, or end other programs"
}
_OTHERWISE = (
    "the lines above say where it began; if none of them is in a file of yours, this is a mistake "
    "of posttrain: please report it, with those lines"
)


class UnreportedError(Exception):
    """Wraps an exception for which typer would end the process without a message."""


@contextlib.contextmanager
def letting_out() -> Iterator[None]:
    """Wrap exceptions that typer handles itself, so that they reach :func:`report`.

    Typer takes any broken pipe for a closed standard output, and any end of a file for that of the
    standard input.
    """
    try:
        yield
    except (KeyboardInterrupt, EOFError, OSError, SystemExit) as error:
        raise UnreportedError from error


@contextlib.contextmanager
def needing_web_server(command: str, otherwise: str = "") -> Iterator[None]:
    """Say what to install where the libraries of a web server are missing, or what else to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "starlette"):
            raise
        install = f"run `pip install 'posttrain[{command}]'`"
        raise ValueError(
            f"{command}: {error.name} is not installed; {install}{otherwise}"
        ) from error


def report(error: BaseException) -> int:
    """Print what ended the command; returns the exit code.

    An error of posttrain for a user's mistake is printed as its message, with code 2. Any other is
    printed with its class and line, with code 1 and a traceback unless its cause is outside.
    """
    if isinstance(error, UnreportedError) and error.__cause__ is not None:
        error = error.__cause__
    quiet = _nobody_reads(error)  # the reader of stdout (head, less) has gone: nothing to report
    _give_up_broken_stdout()
    if quiet:
        return 128 + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        _say(_text(error) or "stopped", colour="")
        return 128 + int(getattr(error, "number", signal.SIGINT))
    if isinstance(error, SystemExit):
        where = f"in code that posttrain called ({_place(error)})"
        _say(f"ended by sys.exit({error.code!r}) {where}")
        return 2
    name, text = type(error).__name__, _text(error)
    known = isinstance(error, ValueError | RuntimeError | OSError)
    if known and text and not isinstance(error, RecursionError):
        own = _frames(error)[-1:] and Path(_frames(error)[-1].filename).is_relative_to(_PACKAGE)
        bare = isinstance(error, OSError) and error.errno and not error.filename
        _say(text if own and not bare else f"{text} ({name} at {_place(error)})")
        return 2
    with contextlib.suppress(Exception):
        _write("".join(traceback.format_exception(error)).rstrip("\n"))
    advice = next((said for kind, said in _WHAT_TO_DO.items() if isinstance(error, kind)), "")
    _say(f"{name}: {text or 'no message'} (at {_place(error)}); {advice or _OTHERWISE}")
    return 1


def _text(error: BaseException) -> str:
    """The message of an exception; of a group, the messages of its first ones."""
    if isinstance(error, BaseExceptionGroup):
        inner = [f"{type(one).__name__}: {_text(one)}" for one in error.exceptions[:_MAX_IN_GROUP]]
        return f"{error}: {'; '.join(inner)}"
    try:
        return str(error).strip()
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the exception
        return ""


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _place(error: BaseException) -> str:
    """The line that raised."""
    frames = _frames(error)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"


def _say(line: str, *, colour: str = "red") -> None:
    _write(f"posttrain: {line}", colour=colour)


def _write(text: str, *, colour: str = "") -> None:
    """Print to standard error, if it is still open."""
    with contextlib.suppress(OSError, ValueError, SystemExit):
        say(text, style=colour, error=True)


def _nobody_reads(error: BaseException) -> bool:
    """Whether a command ended because the reader of its standard output has gone."""
    if isinstance(error, SystemExit):  # rich raises SystemExit where stdout is closed
        return any(frame.name == "on_broken_pipe" for frame in _frames(error)[-1:])
    if not isinstance(error, OSError) or error.errno != errno.EPIPE:
        return False
    try:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    except (AttributeError, OSError, ValueError):  # stdout is no file, as in a test
        return False


def _give_up_broken_stdout() -> None:
    """Redirect a broken stdout, so that Python does not fail to flush it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class WithOverrides(TyperCommand):
    """A command that takes ``--section.key value``; an option of its own, mistyped, is refused."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What may stand behind the command: the keys of a recipe too."""
        return [*super().collect_usage_pieces(ctx), "[--section.key value …]"]

    def invoke(self, ctx: Any) -> Any:
        known = [name for item in self.params for name in item.opts if name.startswith("--")]
        for word in ctx.args:
            name = word.partition("=")[0]
            if word.startswith("--") and "." not in name:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                if near:
                    raise ValueError(f"{self.name}: no option {name}; did you mean {near[0]}?")
        return super().invoke(ctx)


@contextlib.contextmanager
def harmless_mistypings() -> Iterator[None]:
    """Escape the typed words that typer quotes in its own error messages."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            error.message = harmless(error.message)  # type: ignore[attr-defined]
        raise
