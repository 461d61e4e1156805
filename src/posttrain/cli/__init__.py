"""The command line: a thin layer over the library. ``posttrain --help`` lists the commands.

This file loads almost nothing, so that signals are taken before anything slow begins.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it


def main() -> None:
    """Run the command line as a process of its own; Ctrl-C and SIGTERM end it in one line."""
    _take_signals()
    from posttrain.cli.app import main as command_line

    command_line()


def _take_signals() -> None:
    """End at once, whatever the process is at: only a run has something to save, and it does.

    An exception would not do: raised while a library loads, or in a callback, it ends in a
    traceback, or is lost. While a run is under way :class:`posttrain.runs.interrupts.Interrupts`
    takes the signals.
    """
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # and not a copy of it that has not settled yet
            for stream in filter(os.isatty, (1, 2)):
                os.write(stream, _SHOW_CURSOR)
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            start = "\n" if os.isatty(2) else ""  # after the terminal's own ^C
            os.write(2, f"{start}posttrain: stopped by {name}\n".encode())
        os._exit(128 + number)

    def lost(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if isinstance(error, KeyboardInterrupt):  # came in a callback, which cannot pass it on
            end(getattr(error, "number", signal.SIGINT), None)
        sys.__unraisablehook__(unraisable)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    sys.unraisablehook = lost
