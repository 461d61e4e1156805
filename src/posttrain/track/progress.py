"""Progress of long operations: live in a terminal, a line now and then elsewhere.

``with phase("evaluating", total=200, unit="answers"):`` says what the block does; ``advance()``,
called anywhere inside, counts. Both do nothing unless :func:`showing` is active in the same
thread, as it is in a run, in ``posttrain.evaluate`` and behind every command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.track.printable import printable
from posttrain.track.safe_terminal import Terminal
from posttrain.track.shown import duration

SHOWN_AFTER = 2.0  # seconds that a phase lasts before a log gets a line about it
QUIET = 5.0  # seconds between two lines about phases, at least
HEARTBEAT = 30.0  # seconds between two lines of any kind, at most
FLICKER = 0.3  # seconds: a shorter phase is not drawn


@dataclass(eq=False)
class _Phase:
    what: str
    total: int | None
    unit: str
    began: float
    done: int = 0
    shown: bool = False

    def counted(self) -> str:
        """How far it is, where that is known: "48 of 200 answers"."""
        if self.total is None or self.done > self.total:
            return ""
        return f"{self.done:,} of {self.total:,} {self.unit}".rstrip()


class Progress:
    """The current phases, innermost last, shown on one console, unless that is quiet.

    A thread prints, so that lines appear during long calls into a library. While a tracker has a
    live display, that draws the phase too (:meth:`hold`): rich allows one display at a time.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self.process = os.getpid()
        self._phases: list[_Phase] = []
        self._began, self._last_line = clock(), -QUIET
        self._held_above: int | None = None
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def phase(
        self, what: str, *, total: int | None = None, unit: str = "", routine: bool = False
    ) -> Iterator[None]:
        """Show what the block does, and its progress where the total is known.

        A ``routine`` phase gets a line in a log only after a long time without any line.
        """
        phase = _Phase(printable(what, limit=200), total, unit, self._clock(), shown=routine)
        with self._lock:
            self._phases.append(phase)
            self._show()
        try:
            yield
        finally:
            with self._lock:
                if phase in self._phases:  # the display may have been closed meanwhile
                    self._phases.remove(phase)
                    self._show()

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more as done in the innermost phase."""
        if self._phases:
            self._phases[-1].done += count

    def say(self, text: str) -> None:
        """Print a line now, from any thread, unless the display is gone."""
        with self._lock:
            if not self._over.is_set():
                self.printed()
                line = Text(printable(text, limit=300))
                self._console.print(line, soft_wrap=True, highlight=False)

    def printed(self) -> None:
        """Note that a line was printed, which delays the next one."""
        self._last_line = self._clock() - self._began

    def silence(self) -> float:
        """Seconds since the last line."""
        return self._clock() - self._began - self._last_line

    def tick(self) -> None:
        """Print a line where one is due; a thread calls this several times a second."""
        with self._lock:
            if not self._phases:
                return
            phase, now = self._phases[-1], self._clock()
            silence, lasted = self.silence(), now - phase.began
            fresh = not phase.shown and lasted >= SHOWN_AFTER and silence >= QUIET
            if not fresh and silence < HEARTBEAT:
                return
            phase.shown = True
            self.printed()
            facts = [phase.counted(), f"{duration(lasted)} so far"]
            text = f"{phase.what}: {', '.join(fact for fact in facts if fact)}"
            self._console.print(Text(text), soft_wrap=True, highlight=False)

    def hold(self) -> None:
        """A tracker draws the phases that begin from now on."""
        with self._lock:
            self._held_above = len(self._phases)
            self._show()

    def release(self) -> None:
        """The tracker's display is gone."""
        with self._lock:
            self._held_above = None
            self._show()

    def row(self) -> RenderableType | None:
        """The innermost phase in one row, or None where there is nothing to draw."""
        # Without the lock: the drawing thread may hold a lock of rich that stopping a display
        # needs.
        phases = self._phases[self._held_above or 0 :]
        phase = phases[-1] if phases else None
        if phase is None or self._clock() - phase.began < FLICKER:
            return None
        row = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = [Text(phase.what, style="cyan", no_wrap=True)]
        if phase.total and phase.counted():
            cells.append(ProgressBar(total=phase.total, completed=phase.done, width=24))
            cells.append(Text(phase.counted(), no_wrap=True))
        cells.append(Text(duration(self._clock() - phase.began), style="dim", no_wrap=True))
        row.add_row(*cells)
        return row

    def close(self) -> None:
        """Take the display away; a second call does nothing."""
        self._over.set()
        with self._lock:
            self._phases.clear()
            self._show()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        """Start a live display, or a thread that prints lines, if there is something to show."""
        if self._console.quiet:
            return
        if not self._console.is_interactive:
            if self._thread is None and self._phases:
                self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
                self._thread.start()
            return
        wanted = bool(self._phases) and self._held_above is None
        if wanted and self._live is None:
            self._live = Live(
                get_renderable=lambda: self.row() or Text(""),
                console=self._console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # output redirected to a file is not captured
            )
            self._live.start()
        elif not wanted and self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _tell(self) -> None:
        while not self._over.wait(0.25):
            try:
                self.tick()
            except OSError:  # a broken pipe: the main thread will raise it
                return


_CURRENT: ContextVar[Progress | None] = ContextVar("progress", default=None)


def current() -> Progress | None:
    """The current display of this thread; a forked worker has none."""
    progress = _CURRENT.get()
    return progress if progress is not None and progress.process == os.getpid() else None


@contextlib.contextmanager
def showing(console: Console | None = None) -> Iterator[None]:
    """Show phases inside the block, by default on stderr, or on the current display."""
    outer = current()
    if outer is not None and not (console is not None and console.quiet):
        yield
        return
    if console is None:
        force = None if sys.stderr.isatty() else False
        console = Terminal(stderr=True, force_interactive=force)
    progress = Progress(console)
    token = _CURRENT.set(progress)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        progress.close()


@contextlib.contextmanager
def phase(
    what: str, *, total: int | None = None, unit: str = "", routine: bool = False
) -> Iterator[None]:
    """Show what the block (or the decorated function) does on the current display, if any.

    >>> with phase("counting", total=3):
    ...     advance(3)
    """
    progress = current()
    if progress is None:
        yield
        return
    with progress.phase(what, total=total, unit=unit, routine=routine):
        yield


def teller() -> Callable[[str], None]:
    """What prints a line on this thread's display, from any thread; nothing where there is none."""
    progress = current()
    return (lambda line: None) if progress is None else progress.say


def advance(count: int = 1) -> None:
    """Count more as done in the innermost phase of the current display."""
    progress = current()
    if progress is not None:
        progress.advance(count)


@contextlib.contextmanager
def loading(console: Console | None = None) -> Iterator[None]:
    """Show that torch and other large libraries are imported inside, by default on stderr."""
    with showing(console), phase("loading torch and what models need"):
        yield
