"""The numbers of several runs that are made together, shown in the terminal as their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from posttrain.protocols import Tracker
from posttrain.track.console import ConsoleTracker
from posttrain.track.stage import Stage


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
                step,
                {n: fmean(m[n] for m in logged.values() if n in m) for n in sorted(names)},
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
