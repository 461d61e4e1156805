"""A run in the terminal: a live panel, or plain lines where the output is a file or a pipe.

Of several runs that are made together, the mean.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.protocols import Tracker
from posttrain.track.printable import printable
from posttrain.track.progress import QUIET, current
from posttrain.track.safe_terminal import Terminal
from posttrain.track.shown import Shown, choose, duration, sparkline
from posttrain.track.stage import Stage

_MISSING = "-"
_MAX_NOTES = 4  # notes below the panel: rich cannot redraw a display taller than the terminal


class ConsoleTracker:
    """Shows how far the stage is and the numbers that say whether it learns.

    ``step`` counts finished steps, so 0 is before training. A terminal gets a progress bar with
    the time left and a panel that always holds the last value of each metric. Anything else gets
    lines of plain text: the first, the last, every held-out evaluation, and in between one in
    ``every_steps`` steps or, without it, one in ``every_seconds`` seconds. ``show`` names the
    metrics to show instead of the stage's usual ones.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        show: list[str] | None = None,
        every_seconds: float = QUIET,
        every_steps: int | None = None,
        console: Console | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps: must be at least 1, got {every_steps}")
        self._title = printable(stage.title or stage.name, limit=40)
        self._shown = choose(stage.name, show, marks=stage.marks)
        self._pace = _Pace(stage.total_steps)
        self._every_seconds, self._every_steps = every_seconds, every_steps
        # Variables such as FORCE_COLOR do not make a file a terminal.
        interactive = None if sys.stdout.isatty() else False
        self._console = console or Terminal(force_interactive=interactive)
        self._latest: Mapping[str, float] = {}
        self._history: list[float] = []
        self._printed_at: float | None = None
        self._held_back = False
        self._notes: list[Text] = []
        self._live: Live | None = None
        # Kept here, because the thread that draws the panel has no current progress.
        self._progress = current()
        if self._console.is_interactive:
            if self._progress is not None:
                self._progress.hold()
            self._live = Live(
                get_renderable=self._panel, console=self._console, refresh_per_second=4
            )
            self._live.start(refresh=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step."""
        self._pace.advance(step)
        self._latest = {**self._latest, **metrics}  # a new dict: another thread draws the panel
        if self._shown and self._shown[0].metrics[0] in metrics:
            self._history.append(metrics[self._shown[0].metrics[0]])
        if self._live is not None:
            return
        if self._is_due(step, metrics):
            self._print_line()
        else:
            self._held_back = True

    def note(self, text: str) -> None:
        """Show a note: a line in a log, or below the panel on a terminal."""
        line = Text.assemble(("! ", "bold yellow"), printable(text), overflow="fold")
        self._notes = [*self._notes, line][-_MAX_NOTES:]  # a new list: another thread draws it
        if self._live is None:
            self._console.print(line, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Print a line that stays: above the panel on a terminal."""
        self._console.print(Text(printable(text)), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._progress is not None:
                self._progress.release()
        elif self._held_back:
            self._print_line()

    def _is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        evaluated = any(name.startswith("eval/") for name in metrics)
        if self._printed_at is None or evaluated or step == self._pace.total_steps:
            return True
        if self._every_steps is not None:
            return step % self._every_steps == 0
        silence = time.monotonic() - self._printed_at
        if self._progress is not None:
            silence = min(silence, self._progress.silence())
        return silence >= self._every_seconds

    def _print_line(self) -> None:
        self._printed_at, self._held_back = time.monotonic(), False
        texts = ((shown.label, shown.text(self._latest)) for shown in self._shown)
        fields = [f"{label} {text}" for label, text in texts if text is not None]
        left = self._pace.seconds_left()
        if left:
            fields.append(f"ETA {duration(left)}")
        line = "  ".join([f"{self._title} {self._pace}", *fields])
        self._console.print(Text(line), soft_wrap=True, highlight=False)
        if self._progress is not None:
            self._progress.printed()

    def _panel(self) -> RenderableType:
        latest = self._latest
        cells = [(shown.wide, _cell(shown, shown.text(latest))) for shown in self._shown]
        narrow = [cell for wide, cell in cells if cell is not None and not wide]
        doing = self._progress.row() if self._progress is not None else None
        body: list[RenderableType] = [self._bar(), *([doing] if doing is not None else [])]
        body.append(Columns(narrow, padding=(0, 3), equal=True))
        body += [cell for wide, cell in cells if cell is not None and wide]
        if len(self._history) > 1 and self._console.encoding.startswith("utf"):
            course = sparkline(self._history[:], width=max(8, min(60, self._console.width - 24)))
            label = self._shown[0].label
            body.append(Text.assemble((f"{label} ", "dim"), (course, "green"), overflow="crop"))
        title = Text(self._title)
        panel = Panel(Group(*body), title=title, title_align="left", border_style="dim")
        return Group(panel, *self._notes)

    def _bar(self) -> RenderableType:
        left = self._pace.seconds_left()
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(ratio=1)
        for _ in range(3):
            row.add_column(no_wrap=True)
        row.add_row(
            ProgressBar(total=max(1, self._pace.total_steps), completed=self._pace.step),
            Text(f"step {self._pace}", style="bold"),
            Text(f"{duration(self._pace.elapsed())} so far", style="dim"),
            Text(f"{_MISSING if left is None else duration(left)} left", style="cyan"),
        )
        return row


class _Pace:
    """How far a stage is, and how long the rest takes at the pace of its latest steps."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self._start = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)

    def advance(self, step: int) -> None:
        self.step = step
        if not self._recent or step > self._recent[-1][1]:
            self._recent.append((time.monotonic(), step))

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def seconds_left(self) -> float | None:
        """Seconds left; None before the pace is known."""
        if self.step >= self.total_steps:
            return 0.0
        if len(self._recent) < 2:
            return None
        (start, first), (end, last) = self._recent[0], self._recent[-1]
        rest = (end - start) / (last - first) * (self.total_steps - last)
        return max(0.0, rest - (time.monotonic() - end))

    def __str__(self) -> str:
        return f"{self.step}/{self.total_steps}"


def _cell(shown: Shown, text: str | None) -> Text | None:
    if text is None and (shown.alarm or shown.at_rest is not None):
        return None
    broken = shown.alarm or text in ("nan", "inf", "-inf")
    style = "dim" if text is None else "bold red" if broken else "bold"
    return Text.assemble((f"{shown.label} ", "dim"), (text or _MISSING, style))


class MeanConsole:
    """One display for ``number`` runs: a step is shown once all that still run have taken it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._open: set[int] = set()
        self._logged: dict[int, dict[int, Mapping[str, float]]] = {}
        self._console: ConsoleTracker | None = None

    def member(self, number: int, stage: Stage) -> Tracker:
        """What takes the numbers of one of the runs."""
        if self._console is None:
            title = f"{stage.title or stage.name}, mean of {self._number}"
            self._console = ConsoleTracker(replace(stage, title=title))
        self._open.add(number)
        return _Member(self, number)

    def log(self, number: int, step: int, *, metrics: Mapping[str, float]) -> None:
        """The numbers of one run at a step."""
        self._logged.setdefault(step, {})[number] = metrics
        self._show()

    def tell(self, number: int, text: str, *, stays: bool) -> None:
        """Words about one run."""
        if self._console is not None:
            (self._console.say if stays else self._console.note)(f"adapter {number}: {text}")

    def close(self, number: int) -> None:
        """One of the runs has ended; the last closes the display."""
        self._open.discard(number)
        self._show()
        if not self._open and self._console is not None:
            self._console.close()
            self._console = None

    def _show(self) -> None:
        for step in sorted(self._logged):
            logged = self._logged[step]
            if self._console is None or not self._open <= logged.keys():
                return
            names = {name for metrics in logged.values() for name in metrics}
            self._console.log(
                step, {n: fmean(m[n] for m in logged.values() if n in m) for n in sorted(names)}
            )
            del self._logged[step]


class _Member:
    """The tracker of one run."""

    def __init__(self, shown: MeanConsole, number: int) -> None:
        self._shown, self._number = shown, number

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._shown.log(self._number, step, metrics=metrics)

    def note(self, text: str) -> None:
        """Show a note."""
        self._shown.tell(self._number, text, stays=False)

    def say(self, text: str) -> None:
        """Print a line that stays, of the first alone: it is the same for all."""
        if self._number == 0:
            self._shown.tell(self._number, text, stays=True)

    def close(self) -> None:
        """The run has ended."""
        self._shown.close(self._number)
