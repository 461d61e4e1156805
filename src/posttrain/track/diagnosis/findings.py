"""Findings: each rule that holds during a run is reported once, until it no longer holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.protocols import Tracker
from posttrain.track.diagnosis.history import WINDOW, Background, Check, Seen, in_shares
from posttrain.track.diagnosis.rules import RULES, Rule
from posttrain.track.encoding import encode_json
from posttrain.track.jsonl import append_lines
from posttrain.track.sample_table import Rows, log_samples

FILE_NAME = "diagnosis.jsonl"
CLEARS_AFTER = 2 * WINDOW  # steps in a row in which a rule must not hold to be over
KEPT_START, KEPT = 2 * WINDOW, 500  # steps of history: the first ones, and all together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that began to hold at ``step``, and was over at ``until`` unless it still holds.

    ``change`` are overrides for the next run, where a change of the recipe can help. ``remedy`` has
    keys in backticks, which a terminal shows without.
    """

    rule: str
    step: int
    text: str
    remedy: str
    until: int | None = None
    change: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}. {self.remedy}".replace("`", "")


class Diagnosis:
    """Reads the metrics of each step, and says what has begun to go wrong.

    A rule that holds is reported once. It is over when it has not held for ``CLEARS_AFTER`` steps
    in a row; after that it may be reported again. At the end of the stage :meth:`finish` evaluates
    the rules that need its end, or for which a short stage had too few steps, and updates the
    findings that still hold. Metrics from ``before`` the first step come first in the history of
    the rules.

    >>> diagnosis = Diagnosis()
    >>> ill = {"rollout/truncated": 1.0}
    >>> [finding.text for step in range(1, 11) for finding in diagnosis.feed(step, ill)]
    ['100% of the completions are cut by the length limit']
    """

    def __init__(
        self,
        background: Background | None = None,
        *,
        rules: Mapping[str, Rule] = RULES,
        before: Mapping[str, float] | None = None,
    ) -> None:
        self._background = background or Background()
        self._rules = {
            n: rule for n, rule in rules.items() if self._background.stage in rule.stages
        }
        self._history: list[Mapping[str, float]] = []
        self._step = 0
        self._holding: dict[str, int] = {}  # by rule that holds: the index of its finding
        self._quiet: dict[str, int] = {}  # by rule: steps in a row in which it has not held
        # By rule: when it last held, and what it saw.
        self._latest: dict[str, tuple[int, Seen]] = {}
        self.before: Mapping[str, float] = before or {}
        self.findings: list[Finding] = []

    def feed(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Add the metrics of a step; returns the findings that begin with it."""
        self.add_to_history(step, metrics)
        begun = []
        for name, rule in self._rules.items():
            seen = self._ask(rule.check)
            if name in self._holding:
                self._follow(name, seen)
            elif seen is not None:
                begun.append(self._begin(name, seen))
        return begun

    def finish(self, metrics: Mapping[str, float] | None = None) -> list[Finding]:
        """End the stage with further metrics; returns the findings that only its end shows."""
        if metrics:
            self.add_to_history(self._step, metrics)
        for name in list(self._holding):
            self._conclude(name)
        asked = {name: self._ask(rule.at_end) for name, rule in self._rules.items()}
        return [
            self._begin(name, seen)
            for name, seen in asked.items()
            if seen is not None and name not in self._holding
        ]

    def add_to_history(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step to the history without evaluating the rules."""
        self._step = step
        self._background = self._background.judged_by(metrics)
        self._history.append({"step": float(step), **in_shares(metrics, self._background)})
        if len(self._history) > KEPT:
            del self._history[KEPT_START]

    def _ask(self, check: Check | None) -> Seen | None:
        if check is None:
            return None
        before = [in_shares(self.before, self._background)] if self.before else []
        return check([*before, *self._history], self._background)

    def _begin(self, name: str, seen: Seen) -> Finding:
        remedy = self._rules[name].remedies[seen.case]
        self._holding[name], self._quiet[name] = len(self.findings), 0
        self._latest[name] = self._step, seen
        finding = Finding(
            rule=name, step=self._step, text=seen.text, remedy=remedy, change=seen.change
        )
        self.findings.append(finding)
        return finding

    def _follow(self, name: str, seen: Seen | None) -> None:
        self._quiet[name] = 0 if seen is not None else self._quiet[name] + 1
        if seen is not None:
            self._latest[name] = self._step, seen
        if self._quiet[name] >= CLEARS_AFTER:
            self._end(name)

    def _conclude(self, name: str) -> None:
        """Update a finding that holds to the end of the stage, or to where it last held."""
        rule, at = self._rules[name], self._holding[name]
        step, seen = self._step, self._ask(rule.check) or self._ask(rule.at_end)
        if seen is None and rule.at_end is rule.check:
            self._end(name)  # the same check runs at the end, and does not hold any more
            return
        if seen is None:
            step, seen = self._latest[name]
        text = seen.text if step == self._step else f"{seen.text} (at step {step})"
        remedy = rule.remedies[seen.case]
        self.findings[at] = dataclasses.replace(
            self.findings[at], text=text, remedy=remedy, change=seen.change
        )

    def _end(self, name: str) -> None:
        at = self._holding.pop(name)
        self.findings[at] = dataclasses.replace(self.findings[at], until=self._step)


class Diagnosing:
    """A tracker that passes everything on, and writes findings to ``diagnosis.jsonl``.

    The functions in ``tell`` are called with every finding when it begins. ``before`` are the
    metrics that a resumed stage had before its first step; a new stage sets them with
    :meth:`starts_from`. The rules in ``known`` were reported elsewhere and are left out.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        *,
        background: Background | None = None,
        tell: Sequence[Callable[[str], None]] = (),
        before: Mapping[str, float] | None = None,
        known: Collection[str] = (),
    ) -> None:
        self._tracker = tracker
        self._path = folder / FILE_NAME
        rules = {name: rule for name, rule in RULES.items() if name not in known}
        self._diagnosis = Diagnosis(background, rules=rules, before=before)
        self._written: set[Finding] = set()
        self._tell = tell

    def starts_from(self, metrics: Mapping[str, float]) -> None:
        """Set the metrics from before the first step: an evaluation of the initial policy."""
        self._diagnosis.before = dict(metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, and report the findings that begin with it."""
        self._tracker.log(step, metrics)
        self._say(self._feed(step, metrics))

    def log_samples(self, step: int, rows: Rows) -> None:
        """Hand rollouts on."""
        log_samples(self._tracker, step, rows=rows)

    def replay(self, records: Iterable[Mapping[str, float]]) -> None:
        """Rebuild the findings of a resumed run from the records that were logged before."""
        self._path.unlink(missing_ok=True)
        for record in records:
            self._feed(*_split_record(record))

    def recall(self, record: Mapping[str, float]) -> None:
        """Add a record of another stage, which has its own findings, to the history."""
        self._diagnosis.add_to_history(*_split_record(record))

    def finish(self, metrics: Mapping[str, float] | None = None) -> None:
        """End the stage with further metrics, and report the findings that its end shows."""
        begun = self._diagnosis.finish(metrics)
        self._write()
        self._say(begun)

    def _feed(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        begun = self._diagnosis.feed(step, metrics)
        self._write()
        return begun

    def _say(self, begun: Sequence[Finding]) -> None:
        for finding in begun:
            for tell in self._tell:
                tell(str(finding))

    def _write(self) -> None:
        news = [finding for finding in self._diagnosis.findings if finding not in self._written]
        if news:
            append_lines(self._path, b"".join(_line(finding) for finding in news))
            self._written.update(news)

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


def _split_record(record: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """The step of a logged record, and its metrics."""
    return int(record["step"]), {name: value for name, value in record.items() if name != "step"}


def _line(finding: Finding) -> bytes:
    record = {
        "step": finding.step,
        "finding": finding.rule,
        "text": finding.text,
        "remedy": finding.remedy,
        "until": finding.until,
        "change": finding.change,
    }
    return encode_json(record) + b"\n"
