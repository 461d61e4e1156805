"""The results of runs and evaluations, as tables for the terminal.

Prompts and completions are untrusted text: they are shown as plain characters, never as markup, and
control characters are escaped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.report.episode_text import exchange
from posttrain.report.facts import SIGNS, RunFacts, describe_finding
from posttrain.report.held_out import HeldOut, Interval, Share
from posttrain.report.overview import Overview, arrow
from posttrain.track.printable import counted, printable
from posttrain.track.shown import duration, number
from posttrain.types.marks import estimate_label, no_full_marks, reward_label

STYLES = {"finished": "green", "running": "cyan", "unfinished": "yellow", "broken": "bold red"}
REWARD_IS = "reward: of training, means of the first and the last tenth of the steps (ten at most)"
CELL = 60  # characters of a setting at most
# Optional columns, and the width of the screen from which they are shown.
WORDS = {"state": 0, "stages": 110, "algorithm": 90}
_MARKS = {True: "green", False: "red", None: "yellow"}


def render_summary(facts: RunFacts, *, next_steps: Sequence[str] = ()) -> RenderableType:
    """A summary for ``rich.console.Console.print``.

    ``next_steps`` are lines to print as they are: with ``crop=False``, they stay one line each on
    any terminal, for a command that is copied must still be one.
    """
    parts: list[RenderableType] = [_headed(facts.name, _results(facts))]
    if broken := facts.held_out.broken():
        text = f"  broken held-out scores  {printable(broken)}"
        parts.append(Text(text, style="yellow", overflow="fold"))
    if notes := facts.held_out.notes():
        parts.append(_indented([_warning(note) for note in notes]))
    if facts.findings:
        parts.append(_headed("Diagnosis", _indented([_finding(row) for row in facts.findings])))
    if facts.samples:
        drawn = facts.summary.get("answers_shown", "")
        parts.append(_headed(f"Held-out answers: {drawn}", _samples(facts.samples)))
    paths = Table.grid(padding=(0, 2))
    for name, place in facts.paths.items():
        where = Text(printable(str(place)), overflow="fold")
        paths.add_row(Text(f"  {printable(name)}", style="dim"), where)
    parts.append(_headed("Where things are", paths))
    if next_steps:
        shown = (f"  {printable(line)}" for line in next_steps)
        lines = [Text(line, no_wrap=True, overflow="ignore") for line in shown]
        parts.append(_headed("What to try next", Group(*lines)))
    spaced = [item for part in parts for item in (Text(), part)]
    return Group(*spaced, Text())


def _headed(heading: str, body: RenderableType) -> Group:
    return Group(Text(printable(heading), style="bold", overflow="fold"), body)


def _indented(lines: Sequence[Text]) -> Padding:
    return Padding(Group(*lines), (0, 0, 0, 2))


def _warning(text: str) -> Text:
    return Text(printable(text), style="yellow", overflow="fold")


def _results(facts: RunFacts) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("before", justify="right", no_wrap=True)
    table.add_column("after", justify="right", style="bold", no_wrap=True)
    table.add_column("change", justify="right")
    for share in facts.held_out.shares().values():
        table.add_row(Text(printable(share.label)), *_share(share))
    for good, rows in ((1, facts.measures), (-1, facts.losses)):
        for name, values in rows.items():
            cells = ["-" if value is None else number({"": value}) for value in values]
            moved = _moved(*values, pattern="{:+.3f}", good=good)
            table.add_row(Text(printable(name)), *cells, moved)
    for name, text in facts.produced_texts.items():
        table.add_row(name, "", text, "")
    table.add_row("time", "", "-" if facts.seconds is None else duration(facts.seconds), "")
    return table


def _share(share: Share) -> tuple[Text, Text, Text]:
    if share.note:
        return Text(), Text(printable(share.note)), Text()
    before, after = (value and 100 * value for value in share.values)
    moved = _moved(before, after, pattern="{:+.1f} points")
    return _interval(share.before), _interval(share.after), moved


def _interval(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-")
    bounds = f" ({100 * interval.low:.1f}–{100 * interval.high:.1f})"
    return Text.assemble(f"{100 * interval.value:.1f}%", (bounds, "dim"))


def _moved(before: float | None, after: float | None, *, pattern: str, good: int = 1) -> Text:
    """By how much a number has changed, green where that is ``good``."""
    if before is None or after is None:
        return Text()
    moved = after - before
    style = "" if not moved else "green" if good * moved > 0 else "red"
    return Text(pattern.format(moved), style=style)


def _finding(finding: Mapping[str, Any]) -> Text:
    steps, text = describe_finding(finding)
    stage = finding.get("stage", "rl")
    where = "" if stage == "rl" else f"{printable(stage)}: "
    head = f"{where}{printable(finding['finding'])}, {steps}: "
    return Text.assemble((head, "yellow"), printable(text.replace("`", "")), overflow="fold")


def _samples(samples: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    answers = any(sample.get("answer") is not None for sample in samples)
    for heading in ("prompt", *(["expected"] if answers else []), "before", "after"):
        table.add_column(heading, overflow="fold")
    for sample in samples:
        row = [Text(printable(sample["prompt"], limit=160))]
        if answers:
            row.append(Text(printable(sample.get("answer") or "", limit=80)))
        table.add_row(*row, _answer(sample, "before"), _answer(sample, "after"))
    return table


def _answer(sample: Mapping[str, Any], when: str) -> Text:
    text = _said(sample[when], sample.get(f"turns_{when}"))
    right, reward = sample.get(f"right_{when}"), sample.get(f"reward_{when}")
    if right is None and reward is not None:  # no reward checks answers
        return Text.assemble(text, (f"  [{number({'': reward})}]", "dim"))
    return Text.assemble((text + SIGNS[right], _MARKS[right]))


def _said(completion: str, turns: Sequence[Mapping[str, Any]] | None) -> str:
    """What was said behind a prompt; of an episode a line for each turn, with what it earned."""
    if not turns:
        return printable(completion, limit=240)
    lines = []
    for who, text, reward in exchange(turns):
        earned = f" (earned {reward})" if reward else ""
        lines.append(f"{who}: {printable(text, limit=80)}{earned}" if who else text)
    return "\n".join(lines)


def render_evaluation(
    found: HeldOut,
    problems: Sequence[Mapping[str, Any]],
    *,
    title: str,
    show: int = 0,
    seed: int = 0,
) -> RenderableType:
    """The numbers ``after``, and ``show`` of the answers to the problems, drawn at random."""
    notes = found.notes(key="--task.accuracy")
    if found.after["invalid"]:
        notes.append(f"the first broken one: {found.after['reason']}")
    asked = counted(len(problems), "problem")
    parts: list[RenderableType] = [_numbers(found, title=f"{title}, {asked}")]
    parts += [_indented([_warning(note)]) for note in notes]
    if show:
        checked = "accuracy" in found.after["estimates"]
        parts += [Text(), _answers(problems, show=show, seed=seed, checked=checked)]
    return Group(*parts)


def _numbers(found: HeldOut, *, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(Text(f"{printable(title)}, greedy answers"))
    table.add_column("", justify="right")
    table.add_column("95% interval", justify="right")
    for name, estimate in found.after["estimates"].items():
        interval = Interval(**estimate)
        bounds = f"[{interval.low:.1%}, {interval.high:.1%}]"
        label = printable(estimate_label(name, found.accuracy_by))
        table.add_row(Text(label), f"{interval.value:.1%}", Text(bounds))
    for name, largest in found.above_one.items():
        share = "accuracy" if found.accuracy_by else f"full_marks/{name}"
        label = printable(estimate_label(share, found.accuracy_by))
        table.add_row(Text(label), "—", no_full_marks(largest).removeprefix("— "))
    table.add_row("mean reward, weighted sum", f"{found.after['reward']:.3f}", "")
    for name, mean in found.after["parts"].items():
        label = printable(reward_label(name, found.weights))
        table.add_row(Text(f"mean of {label}"), f"{mean:.3f}", "")
    if found.after["invalid"]:
        table.add_row("broken scores", f"{found.after['invalid']:.1%}", "")
    return table


def _answers(
    problems: Sequence[Mapping[str, Any]], *, show: int, seed: int, checked: bool
) -> Table:
    total = len(problems)
    rows = sorted(random.Random(seed).sample(range(total), min(show, total)))
    how = f"{len(rows)} of {total} answers, drawn at random (seed {seed})"
    table = Table(box=SIMPLE_HEAD, title=how, title_justify="left")
    for heading in ("prompt", "expected", "answer"):
        table.add_column(heading, overflow="fold")
    table.add_column("reward", overflow="fold", justify="right")
    for place in rows:
        row = problems[place]
        answer = _said(row["completion"], row.get("turns"))
        answer += SIGNS[row["correct"]] if checked else ""
        value = f"{row['reward']:.3f}" if row["state"] == "ok" else "broken"
        question = Text(printable(row["prompt"], limit=160))
        expected = Text(printable(row["answer"] or "", limit=80))
        table.add_row(question, expected, Text(answer), value)
    return table


def render_runs(rows: Sequence[Overview], *, names: Sequence[str], width: int) -> RenderableType:
    """Runs in a line each, for a screen of this width."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    words = [word for word, needed in WORDS.items() if width >= needed]
    numbers = ("steps", "held-out", "reward", "time")
    table.add_column("run", overflow="fold", min_width=10)
    for word in words:
        table.add_column(word, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=heading != "held-out", overflow="fold")
    for row, name in zip(rows, names, strict=True):
        cells = {
            "state": Text(row.state, style=STYLES[row.state]),
            "stages": Text(printable(" ".join(row.stages)) or "-"),
            "algorithm": Text(printable(row.algorithm or "-", limit=30)),
        }
        cells |= {key: Text(text) for key, text in _final(row).items()}
        table.add_row(Text(printable(name)), *(cells[key] for key in (*words, *numbers)))
    return Group(table, *_below(rows, names))


def render_comparison(
    rows: Sequence[Overview], differing: Mapping[str, list[str]]
) -> RenderableType:
    """Runs side by side: their final numbers, then the settings in which they differ."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", style="dim")
    names = [str(row.path) for row in rows]
    for name in names:
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    table.add_row("state", *(Text(row.state, style=STYLES[row.state]) for row in rows))
    numbers = [_final(row) for row in rows]
    for name in numbers[0]:
        table.add_row(name, *(Text(each[name]) for each in numbers))
    table.add_section()
    for name, values in (differing or {"config": ["the same"] * len(rows)}).items():
        cells = (Text(printable(value, limit=CELL)) for value in values)
        table.add_row(Text(printable(name)), *cells)
    return Group(table, *_below(rows, names))


def _below(rows: Sequence[Overview], names: Sequence[str]) -> list[Text]:
    """Notes below the table: what the reward is, and why a run could not be read."""
    problems = {name: row.problem for name, row in zip(names, rows, strict=True) if row.problem}
    lines = [f"{printable(name)}: {printable(why, limit=300)}" for name, why in problems.items()]
    return [Text(REWARD_IS, style="dim"), *map(Text, lines)]


def _final(row: Overview) -> dict[str, str]:
    """The final numbers of a run, as they are shown."""
    done = "-" if row.steps_done is None else f"{row.steps_done:,}"
    of = "" if row.steps is None or row.steps == row.steps_done else f" of {row.steps:,}"
    return {
        "steps": done + of,
        "held-out": _held_out(row),
        "reward": arrow(row.reward_first, row.reward_last, pattern="{:.3g}", unknown="-"),
        "findings": str(row.findings),
        "time": "-" if row.seconds is None else duration(row.seconds),
    }


def _held_out(row: Overview) -> str:
    """The accuracy and its reward; without a check of answers, the shares with full marks."""
    if row.accuracy_by:
        change = arrow(row.accuracy_before, row.accuracy_after, pattern="{:.1%}", unknown="-")
        return change if change == "-" else f"{change} accuracy ({printable(row.accuracy_by)})"
    shares = [
        f"{arrow(*both, pattern='{:.1%}', unknown='-')} full marks of {printable(name)}"
        for name, both in row.full_marks.items()
    ]
    return ", ".join(shares) or "-"
