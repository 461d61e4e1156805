"""What came out of a run, as a table for the terminal.

Prompts and completions are text that nobody vouches for: they are shown as plain characters, never
as markup, and control characters are written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.runs.held_out import Interval, Share
from posttrain.track.shown import duration, number
from posttrain.track.text import printable

Change = tuple[float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, and what the model wrote before and after.

    ``right`` is None where an answer could not be graded, and where nothing checks answers: then
    its ``reward`` is shown.
    """

    prompt: str
    before: str
    after: str
    answer: str | None = None
    right_before: bool | None = None
    right_after: bool | None = None
    reward_before: float | None = None
    reward_after: float | None = None


def render_summary(
    *,
    title: str,
    seconds: float,
    shares: Sequence[Share] = (),
    broken: str = "",
    notes: Sequence[str] = (),
    measures: Mapping[str, Change] | None = None,
    losses: Mapping[str, Change] | None = None,
    facts: Mapping[str, str] | None = None,
    places: Mapping[str, str | Path] | None = None,
    findings: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Sample] = (),
    drawn: str = "",
    next_steps: Sequence[str] = (),
) -> RenderableType:
    """A summary for ``rich.console.Console.print``; ``shares`` are of held-out answers.

    ``broken`` says how many held-out scores broke and why, where any did, ``notes`` what else there
    is to say of the numbers; ``measures`` are further numbers before and after, ``losses`` those
    that should fall, ``facts`` further results, by name; ``findings`` are what went wrong on the
    way, as in ``diagnosis.jsonl``; ``drawn`` is how the samples were picked; ``places`` says where
    things are; ``next_steps`` are lines to print as they are: with ``crop=False``, they stay one
    line each on any terminal.
    """
    results = _results(shares)
    for name, change in (measures or {}).items():
        _add(results, name, change=change)
    for name, change in (losses or {}).items():
        _add(results, name, change=change, good=-1)
    for name, text in (facts or {}).items():
        results.add_row(name, "", text, "")
    results.add_row("time", "", duration(seconds), "")
    parts: list[RenderableType] = [_headed(title, results)]
    if broken:
        text = f"  broken held-out scores  {printable(broken)}"
        parts.append(Text(text, style="yellow", overflow="fold"))
    told = [Text(printable(note), style="yellow", overflow="fold") for note in notes]
    parts += [Padding(Group(*told), (0, 0, 0, 2))] if told else []
    if findings:
        parts.append(_headed("Diagnosis", _findings(findings)))
    if samples:
        parts.append(_headed(f"Held-out answers: {drawn}", _samples(samples)))
    if places:
        parts.append(_headed("Where things are", _places(places)))
    if next_steps:
        lines = [_whole_line(f"  {printable(line)}") for line in next_steps]
        parts.append(_headed("What to try next", Group(*lines)))
    spaced = [item for part in parts for item in (Text(), part)]
    return Group(*spaced, Text())


def _whole_line(text: str) -> Text:
    """A line that is not broken: copied from a terminal, a command must still be one."""
    return Text(text, no_wrap=True, overflow="ignore")


def _headed(heading: str, body: RenderableType) -> Group:
    return Group(Text(printable(heading), style="bold", overflow="fold"), body)


def _results(shares: Sequence[Share]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("before", justify="right", no_wrap=True)
    table.add_column("after", justify="right", style="bold", no_wrap=True)
    table.add_column("change", justify="right")
    for share in shares:
        before, after = share.before, share.after
        change = None if before is None or after is None else after.value - before.value
        told = "" if change is None else f"{100 * change:+.1f} points"
        if share.note:
            cells = (Text(), Text(printable(share.note)))
        else:
            cells = (_interval(before), _interval(after))
        table.add_row(Text(printable(share.label)), *cells, Text(told, style=_colour(change)))
    return table


def _add(table: Table, name: str, *, change: Change, good: int = 1) -> None:
    first, last = ("-" if value is None else number({"": value}) for value in change)
    before, after = change
    moved = None if before is None or after is None else after - before
    text = "" if moved is None else f"{moved:+.3f}"
    style = _colour(None if moved is None else good * moved)
    table.add_row(Text(printable(name)), first, last, Text(text, style=style))


def _findings(findings: Sequence[Mapping[str, Any]]) -> Padding:
    lines = []
    for finding in findings:
        until = finding.get("until")
        steps = f"step {finding['step']}"
        steps += " to the end" if until is None else f", cleared at step {until}"
        stage = finding.get("stage", "rl")
        where = "" if stage == "rl" else f"{printable(stage)}: "
        head = f"{where}{printable(finding['finding'])}, {steps}: "
        body = f"{printable(finding['text'])}."
        body += f" {printable(finding['remedy'])}" if until is None else ""  # nothing is to be done
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
        row.append(_answer(sample.before, sample.right_before, reward=sample.reward_before))
        row.append(_answer(sample.after, sample.right_after, reward=sample.reward_after))
        table.add_row(*row)
    return table


def _places(places: Mapping[str, str | Path]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, place in places.items():
        table.add_row(
            Text(f"  {printable(name)}", style="dim"), Text(printable(str(place)), overflow="fold")
        )
    return table


def _answer(text: str, right: bool | None, *, reward: float | None) -> Text:
    style = "yellow" if right is None else "green" if right else "red"
    mark = " ?" if right is None else " ✓" if right else " ✗"
    if right is None and reward is not None:  # nothing says whether it is right
        return Text.assemble(printable(text, limit=240), (f"  [{number({'': reward})}]", "dim"))
    return Text.assemble((printable(text, limit=240), style), (mark, style))


def _interval(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-")
    bounds = f" ({100 * interval.low:.1f}–{100 * interval.high:.1f})"
    return Text.assemble(f"{100 * interval.value:.1f}%", (bounds, "dim"))


def _colour(change: float | None) -> str:
    return "" if not change else "green" if change > 0 else "red"
