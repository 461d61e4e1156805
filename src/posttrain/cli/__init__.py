"""The command line: a thin layer over the library. ``posttrain --help`` lists the commands.

This file imports almost nothing, so that signal handlers are set before slow imports.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides the cursor


def main() -> None:
    """Run the command line as a process of its own; Ctrl-C and SIGTERM end it in one line."""
    _take_signals()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        from posttrain.distributed.torchrun import enter

        enter()  # only rank 0 goes on: the other ranks are part of its learner
    from posttrain.cli.app import main as command_line

    command_line()


def _take_signals() -> None:
    """Let signals end the process at once: only a run has something to save.

    An exception would not do: raised while a library is imported, or in a callback, it ends in a
    traceback, or is lost. During a run :class:`posttrain.runs.interrupts.Interrupts`
    handles the signals.
    """
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not in a forked worker that still has this handler
            for stream in filter(os.isatty, (1, 2)):
                os.write(stream, _SHOW_CURSOR)
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            start = "\n" if os.isatty(2) else ""  # a new line after the ^C that the terminal prints
            os.write(2, f"{start}posttrain: stopped by {name}\n".encode())
        os._exit(128 + number)

    def lost(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if isinstance(error, KeyboardInterrupt):  # raised in a callback, where it cannot propagate
            end(getattr(error, "number", signal.SIGINT), None)
        sys.__unraisablehook__(unraisable)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    sys.unraisablehook = lost
