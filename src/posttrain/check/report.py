"""What a check says: lines that pass, warn or fail, each with what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from posttrain.config import ConfigError, Quantity
from posttrain.track.text import MARKS, printable

Area = Literal["config", "data", "rewards", "signal", "numerics", "resources"]
State = Literal["pass", "warn", "fail"]
AREAS: tuple[Area, ...] = ("config", "data", "rewards", "signal", "numerics", "resources")
MEND = "mend this, then check again"
BROKE = "report this as a fault of posttrain; the run is not held up by it"
WAY = "weights to engine"
ALWAYS_STOP = (WAY,)  # the run would learn from another policy's samples
NOTES = ("passes", "sft and rl prompts")  # said at the start of every run
MAX_TEXT = 500


class CheckFailedError(RuntimeError):
    """A run that must not begin as it is."""


class Line(NamedTuple):
    """One thing that was looked at: what was found and, unless it passes, what to do."""

    area: Area
    name: str
    state: State
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All lines of a check in the order of the areas, and the batch arithmetic of the recipe."""

    lines: Sequence[Line]
    arithmetic: Sequence[Quantity] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return not self.of("fail")

    def of(self, state: State) -> list[Line]:
        """The lines in a state."""
        return [line for line in self.lines if line.state == state]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "lines": [line._asdict() for line in self.lines],
            "arithmetic": [row._asdict() for row in self.arithmetic],
        }

    def announce(self, console: Console) -> Report:
        """Print what does not pass, how much does and the notes, and return the report itself."""
        for state in ("fail", "warn"):
            for line in self.of(state):
                mark, style = MARKS[line.state]
                said = f"{mark} check: {line.area}: {line.name}: {line.text}\n  → {line.fix}"
                console.print(Text(said, style=style))
        passed = self.of("pass")
        if passed:
            notes = [f"{line.name}: {line.text}" for line in passed if line.name in NOTES]
            mark, style = MARKS["pass"]
            said = "; ".join([f"{mark} check: {len(passed)} lines pass", *notes])
            console.print(Text(said, style=style))
        return self

    def require(self) -> Report:
        """The report itself, or a :class:`CheckFailedError` with every line that fails."""
        return self._refuse(self.of("fail"))

    def enforce(self, mode: Literal["stop", "warn"]) -> Report:
        """What a run asks: the report, or :class:`CheckFailedError` where it must not begin.

        With "warn" only what would train on wrong data does that.
        """
        return self._refuse([n for n in self.of("fail") if mode == "stop" or n.name in ALWAYS_STOP])

    def _refuse(self, lines: Sequence[Line]) -> Report:
        if not lines:
            return self
        failed = "".join(f"\n  {n.area}: {n.name}: {n.text}; {n.fix}" for n in lines)
        always = all(line.name in ALWAYS_STOP for line in lines)
        how = 'rl.check = "off" goes on all the same'
        if not always:
            how = '--check warn goes on anyway, from Python check="warn"'
        raise CheckFailedError(f"check: this run cannot work as it is{failed}\nMend it; {how}")


@dataclass
class Findings:
    """Collects the lines of one area; where it is ``soft``, what fails is only a warning."""

    area: Area
    soft: str = ""
    """Why nothing here can be held against the recipe, for the fix of such a line."""
    lines: list[Line] = field(default_factory=list)

    def passed(self, name: str, text: str) -> None:
        """All is well."""
        self._add(name, "pass", text=text)

    def warned(self, name: str, text: str, *, fix: str) -> None:
        """It can be run, and may not be meant."""
        self._add(name, "warn", text=text, fix=self._softened(fix))

    def failed(self, name: str, text: str, *, fix: str) -> None:
        """The run cannot work, or not as meant."""
        self._add(name, "warn" if self.soft else "fail", text=text, fix=self._softened(fix))

    def judged(self, name: str, text: str, *, state: State, fix: str) -> None:
        """A line whose state was computed."""
        if state == "pass":
            self.passed(name, text)
        else:
            (self.warned if state == "warn" else self.failed)(name, text, fix=fix)

    def problems(self, name: str, error: BaseException) -> None:
        """What an error says, as lines that fail: one for each problem of a recipe."""
        found = error.problems if isinstance(error, ConfigError) else (_said(error),)
        for problem in found:
            text, _, fix = problem.partition("; ")
            key, _, rest = text.partition(": ")
            is_key = isinstance(error, ConfigError) and bool(rest) and " " not in key
            self._add(
                key if is_key else name, "fail", text=rest if is_key else text, fix=fix or MEND
            )

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """What breaks inside would break the run as well, and becomes a line that fails."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is shown, as a line that fails
            self.problems(name, error)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What breaks inside is the check itself: a line that warns, for the run may well work."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is shown, as a line that warns
            said = f"the check itself broke, so nothing is known: {type(error).__name__}: {error}"
            self._add(name, "warn", text=" ".join(said.split()), fix=BROKE)

    @contextlib.contextmanager
    def excused(self, why: str) -> Iterator[None]:
        """Soft inside, unless ``why`` is empty; a reason that was there before comes first."""
        before, self.soft = self.soft, self.soft or why
        try:
            yield
        finally:
            self.soft = before

    def _softened(self, fix: str) -> str:
        return f"{self.soft}; if not, {fix}" if self.soft else fix

    def _add(self, name: str, state: State, *, text: str, fix: str = "") -> None:
        shown = printable(text, limit=MAX_TEXT), printable(fix, limit=MAX_TEXT)
        self.lines.append(Line(self.area, printable(name, limit=60), state, *shown))


def _said(error: BaseException) -> str:
    """An error in a line; one that is not ours, with its kind."""
    text = " ".join(str(error).split())
    ours = isinstance(error, ValueError | RuntimeError) and bool(text)
    return text if ours else f"{type(error).__name__}: {text}"


Book = Mapping[Area, Findings]
"""The findings of every area."""


def new_book() -> Book:
    """Findings of every area, all empty."""
    return {area: Findings(area) for area in AREAS}
