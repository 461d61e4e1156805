"""What came out of a run, as a table for the terminal.

Prompts and completions are text that nobody vouches for: they are shown as plain characters, never
as markup, and control characters are written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.track.shown import duration, number
from posttrain.track.text import printable


class Interval(NamedTuple):
    """A measured value and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, and what the model wrote before and after.

    ``right`` is None where an answer could not be graded.
    """

    prompt: str
    before: str
    after: str
    answer: str | None = None
    right_before: bool | None = None
    right_after: bool | None = None


def render_summary(
    *,
    title: str,
    seconds: float,
    accuracy_before: Interval | None = None,
    accuracy_after: Interval | None = None,
    broken: str = "",
    reward: tuple[float, float] | None = None,
    measures: Mapping[str, tuple[float | None, float | None]] | None = None,
    facts: Mapping[str, str] | None = None,
    places: Mapping[str, str | Path] | None = None,
    findings: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Sample] = (),
    next_steps: Sequence[str] = (),
) -> RenderableType:
    """A summary for ``rich.console.Console.print``; ``reward`` is that of the first and last step.

    ``broken`` says how many held-out scores broke and why, where any did; ``measures`` are further
    numbers before and after, ``facts`` further results, by name; ``findings`` are what went wrong
    on the way, as in ``diagnosis.jsonl``; ``places`` says where things are; ``next_steps`` are
    lines to print as they are.
    """
    results = _results(accuracy_before, accuracy_after)
    pairs = {**(measures or {}), **({} if reward is None else {"training reward": reward})}
    for name, (first, last) in pairs.items():
        _add(results, name, before=first, after=last)
    for name, text in (facts or {}).items():
        results.add_row(name, "", text, "")
    results.add_row("time", "", duration(seconds), "")
    parts: list[RenderableType] = [_headed(title, results)]
    if broken:
        text = f"  broken held-out scores  {printable(broken)}"
        parts.append(Text(text, style="yellow", overflow="fold"))
    if findings:
        parts.append(_headed("Diagnosis", _findings(findings)))
    if samples:
        parts.append(_headed("Held-out answers", _samples(samples)))
    if places:
        parts.append(_headed("Where things are", _places(places)))
    if next_steps:
        lines = [Text(printable(line), overflow="fold") for line in next_steps]
        parts.append(_headed("What to try next", Padding(Group(*lines), (0, 0, 0, 2))))
    spaced = [item for part in parts for item in (Text(), part)]
    return Group(*spaced, Text())


def _headed(heading: str, body: RenderableType) -> Group:
    return Group(Text(printable(heading), style="bold", overflow="fold"), body)


def _results(before: Interval | None, after: Interval | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("before", justify="right", no_wrap=True)
    table.add_column("after", justify="right", style="bold", no_wrap=True)
    table.add_column("change", justify="right")
    if before is not None or after is not None:
        change = None if before is None or after is None else after.value - before.value
        table.add_row(
            "held-out accuracy",
            _interval(before),
            _interval(after),
            Text("" if change is None else f"{100 * change:+.1f} points", style=_colour(change)),
        )
    return table


def _add(table: Table, name: str, *, before: float | None, after: float | None) -> None:
    first, last = ("-" if value is None else number({"": value}) for value in (before, after))
    change = None if before is None or after is None else after - before
    text = "" if change is None else f"{change:+.3f}"
    table.add_row(name, first, last, Text(text, style=_colour(change)))


def _findings(findings: Sequence[Mapping[str, Any]]) -> Padding:
    lines = []
    for finding in findings:
        until = finding.get("until")
        steps = f"step {finding['step']} to {'the end' if until is None else until}"
        stage = finding.get("stage", "rl")
        where = "" if stage == "rl" else f"{printable(stage)}: "
        head = f"{where}{printable(finding['finding'])}, {steps}: "
        body = f"{printable(finding['text'])}. {printable(finding['remedy'])}"
        lines.append(Text.assemble((head, "yellow"), body, overflow="fold"))
    return Padding(Group(*lines), (0, 0, 0, 2))


def _samples(samples: Sequence[Sample]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt", overflow="fold")
    answers = any(sample.answer is not None for sample in samples)
    if answers:
        table.add_column("expected", overflow="fold")
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for sample in samples:
        row = [Text(printable(sample.prompt, limit=160))]
        if answers:
            row.append(Text(printable(sample.answer or "", limit=80)))
        row.append(_answer(sample.before, sample.right_before))
        row.append(_answer(sample.after, sample.right_after))
        table.add_row(*row)
    return table


def _places(places: Mapping[str, str | Path]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, place in places.items():
        table.add_row(
            Text(f"  {printable(name)}", style="dim"), Text(printable(str(place)), overflow="fold")
        )
    return table


def _answer(text: str, right: bool | None) -> Text:
    style = "yellow" if right is None else "green" if right else "red"
    mark = " ?" if right is None else " ✓" if right else " ✗"
    return Text.assemble((printable(text, limit=240), style), (mark, style))


def _interval(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-")
    bounds = f" ({100 * interval.low:.1f}–{100 * interval.high:.1f})"
    return Text.assemble(f"{100 * interval.value:.1f}%", (bounds, "dim"))


def _colour(change: float | None) -> str:
    return "" if not change else "green" if change > 0 else "red"
