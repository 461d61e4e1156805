"""The results of checks: lines that pass, warn or fail, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from posttrain.config import ConfigError, Quantity
from posttrain.track.printable import MARKS, printable

Area = Literal["config", "data", "rewards", "signal", "numerics", "resources"]
State = Literal["pass", "warn", "fail"]
AREAS: tuple[Area, ...] = ("config", "data", "rewards", "signal", "numerics", "resources")
MEND = "fix this, then check again"
BROKE = "report this as a bug in posttrain; the run is not held up by it"
WAY = "weights to engine"
ALWAYS_STOP = (WAY,)  # else the run would learn from samples of another policy
NOTES = ("passes", "sft and rl prompts")  # lines that a run prints though they pass
MAX_TEXT = 500


class CheckFailedError(RuntimeError):
    """A run that must not begin as it is."""


class Verdict(NamedTuple):
    """The result of a check and, unless it passes, the fix; ``name`` replaces that of the check.

    "fail": the run cannot work, or not as meant; "warn": it can, but may not be what is meant.
    """

    state: State
    text: str
    fix: str = ""
    name: str = ""


class Line(NamedTuple):
    """A line of the report: what was checked, the result and, unless it passes, the fix."""

    area: Area
    name: str
    state: State
    text: str
    fix: str = ""

    @classmethod
    def of(cls, area: Area, verdict: Verdict, *, name: str, soft: str = "") -> Line:
        """A verdict as a line, safe to print; a reason in ``soft`` makes a failure a warning."""
        state, text, fix, own = verdict
        if state == "pass":
            fix = ""
        elif soft:
            state, fix = "warn", f"{soft}; if not, {fix}"
        shown = printable(text, limit=MAX_TEXT), printable(fix, limit=MAX_TEXT)
        return cls(area, printable(own or name, limit=60), state, *shown)


class TokenRow(NamedTuple):
    """A token of an episode: what it spells, safe to print, who wrote it, whether it is trained."""

    token: int
    text: str
    writer: str
    trained: bool


def broke(error: Exception) -> Verdict:
    """A warning about an exception in a check itself: the run may well work."""
    said = f"the check itself broke, so nothing is known: {type(error).__name__}: {error}"
    return Verdict("warn", " ".join(said.split()), BROKE)


def problems(error: Exception) -> Iterator[Verdict]:
    """Failures from an exception that would break the run too, one for each problem."""
    config = isinstance(error, ConfigError)
    for problem in error.problems if isinstance(error, ConfigError) else (_one_line(error),):
        text, _, fix = problem.partition("; ")
        key, _, rest = text.partition(": ")
        is_key = config and bool(rest) and " " not in key
        yield Verdict("fail", rest if is_key else text, fix or MEND, key if is_key else "")


def _one_line(error: Exception) -> str:
    """An error in one line; with its class, unless it is an error message of posttrain."""
    text = " ".join(str(error).split())
    ours = isinstance(error, ValueError | RuntimeError) and bool(text)
    return text if ours else f"{type(error).__name__}: {text}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All lines of a check in the order of the areas, and the batch arithmetic of the recipe.

    ``episode`` are the tokens of one rollout, where the recipe has an environment.
    """

    lines: Sequence[Line]
    arithmetic: Sequence[Quantity] = ()
    episode: Sequence[TokenRow] = ()
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
            "episode": [row._asdict() for row in self.episode],
        }

    def announce(self, console: Console) -> Report:
        """Print the lines that do not pass, the number of those that do and notes; returns self."""
        for line in [*self.of("fail"), *self.of("warn")]:
            mark, style = MARKS[line.state]
            said = f"{mark} check: {line.area}: {line.name}: {line.text}\n  → {line.fix}"
            console.print(Text(said, style=style))
        passed = self.of("pass")
        if passed:
            notes = [f"{line.name}: {line.text}" for line in passed if line.name in NOTES]
            mark, style = MARKS["pass"]
            said = "; ".join([f"{mark} check: {len(passed)} passed", *notes])
            console.print(Text(said, style=style))
        return self

    def enforce(self, mode: Literal["stop", "warn"]) -> Report:
        """The report, or :class:`CheckFailedError` where a line fails.

        With mode "warn" only lines of ``ALWAYS_STOP`` raise.
        """
        lines = [n for n in self.of("fail") if mode == "stop" or n.name in ALWAYS_STOP]
        if not lines:
            return self
        failed = "; ".join(f"{line.area}: {line.name}" for line in lines)
        how = 'run anyway with rl.check = "off"'
        if not all(line.name in ALWAYS_STOP for line in lines):
            how = 'continue anyway with --check warn (Python: check="warn")'
        raise CheckFailedError(
            f"check: this run cannot work as it is ({failed}: see {MARKS['fail'][0]} above)\n"
            f"Fix it, or {how}"
        )
