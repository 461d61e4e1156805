"""Findings: what the rules say while a run goes on, each once, until it is over."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.protocols import Tracker
from posttrain.track.diagnosis.history import WINDOW, Setup
from posttrain.track.diagnosis.rules import RULES, Rule
from posttrain.track.encoding import encode_json
from posttrain.track.jsonl import append_lines

FILE_NAME = "diagnosis.jsonl"
CLEARS_AFTER = 2 * WINDOW  # steps in a row without it: what comes and goes is one finding
KEPT_START, KEPT = 2 * WINDOW, 500  # steps: the first ones are what later ones are compared with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that began to hold at ``step``, and was over at ``until`` unless it still holds."""

    rule: str
    step: int
    text: str
    remedy: str
    until: int | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}. {self.remedy}"


class Diagnosis:
    """Reads the metrics of each step, and says what has begun to go wrong.

    A rule that holds is reported once. It is over when it has not held for ten steps in a row;
    after that it may be reported again.

    >>> diagnosis = Diagnosis()
    >>> ill = {"rollout/truncated": 1.0}
    >>> [finding.text for step in range(1, 11) for finding in diagnosis.feed(step, ill)]
    ['100% of the completions are cut by the length limit']
    """

    def __init__(self, setup: Setup | None = None, *, rules: Mapping[str, Rule] = RULES) -> None:
        self._setup = setup or Setup()
        self._rules = rules
        self._history: list[Mapping[str, float]] = []
        self._holding: dict[str, int] = {}  # where in the findings the latest of a rule stands
        self._quiet: dict[str, int] = {}  # steps in a row that it has not held
        self.findings: list[Finding] = []

    def feed(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take the metrics of a step; what begins with it."""
        self._history.append(dict(metrics))
        if len(self._history) > KEPT:
            del self._history[KEPT_START]
        begun = []
        for name, rule in self._rules.items():
            text = rule.check(self._history, self._setup)
            if name in self._holding:
                self._follow(name, step, holds=text is not None)
            elif text is not None:
                begun.append(Finding(rule=name, step=step, text=text, remedy=rule.remedy))
                self._holding[name], self._quiet[name] = len(self.findings), 0
                self.findings.append(begun[-1])
        return begun

    def _follow(self, name: str, step: int, *, holds: bool) -> None:
        self._quiet[name] = 0 if holds else self._quiet[name] + 1
        if self._quiet[name] >= CLEARS_AFTER:
            at = self._holding.pop(name)
            self.findings[at] = dataclasses.replace(self.findings[at], until=step)


class Diagnosing:
    """A tracker that passes everything on, and writes findings to ``diagnosis.jsonl``.

    ``tell`` is called with every finding when it begins.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        *,
        setup: Setup | None = None,
        tell: Sequence[Callable[[str], None]] = (),
    ) -> None:
        self._tracker = tracker
        self._path = folder / FILE_NAME
        self._diagnosis = Diagnosis(setup)
        self._written: set[Finding] = set()
        self._tell = tell

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, and what they say."""
        self._tracker.log(step, metrics)
        for finding in self._feed(step, metrics):
            for tell in self._tell:
                tell(str(finding))

    def replay(self, records: Iterable[Mapping[str, float]]) -> None:
        """Begin anew with what was logged before: a run that goes on finds what it would have."""
        self._path.unlink(missing_ok=True)
        for record in records:
            metrics = {name: value for name, value in record.items() if name != "step"}
            self._feed(int(record["step"]), metrics)

    def _feed(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        begun = self._diagnosis.feed(step, metrics)
        news = [finding for finding in self._diagnosis.findings if finding not in self._written]
        if news:
            append_lines(self._path, b"".join(_line(finding) for finding in news))
            self._written.update(news)
        return begun

    def close(self) -> None:
        """Close the tracker behind it."""
        self._tracker.close()


def read_findings(path: Path) -> list[dict[str, Any]]:
    """The findings of a ``diagnosis.jsonl`` in order; a later line on the same one replaces it."""
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    found = {}
    for line in lines:
        record = json.loads(line)
        found[record["finding"], record["step"]] = record
    return list(found.values())


def _line(finding: Finding) -> bytes:
    record = {
        "step": finding.step,
        "finding": finding.rule,
        "text": finding.text,
        "remedy": finding.remedy,
        "until": finding.until,
    }
    return encode_json(record) + b"\n"
