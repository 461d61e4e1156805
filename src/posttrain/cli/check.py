"""``posttrain check``: the report of a check on one screen, or as JSON."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from posttrain.cli.recipes import arithmetic_table
from posttrain.config.read import parse_overrides
from posttrain.track.printable import MARKS, counted
from posttrain.track.progress import loading, phase, showing
from posttrain.track.safe_terminal import Terminal, say_json

if TYPE_CHECKING:
    from posttrain.check import Report
    from posttrain.check.verdicts import TokenRow

SHOWN = 24  # tokens of a run that a terminal shows


def check(arguments: Sequence[str], *, fast: bool, as_json: bool) -> int:
    """Check a recipe and print what was found; the exit code is 1 where something fails."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            "check: name the recipe first: posttrain check RECIPE.toml [--rl.steps 6 …]"
        )
    path, *overrides = arguments
    begun = time.monotonic()
    parse_overrides(overrides)
    with loading():
        from posttrain.check import check_file

    # A reward may print: its output goes to stderr, because stdout is for the report.
    with contextlib.redirect_stdout(sys.stderr), showing(), phase("checking"):
        report = check_file(path, overrides, fast=fast)
    report = replace(report, seconds=time.monotonic() - begun)  # with the libraries' loading
    if as_json:
        say_json(report.to_dict())
    else:
        Terminal().print(render(report))
    return 0 if report.ok else 1


def render(report: Report) -> Group:
    """The report for a terminal."""
    parts: list[Table | Text] = []
    if report.arithmetic:
        parts.append(arithmetic_table(report.arithmetic))
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    area = ""
    for line in report.lines:
        mark, style = MARKS[line.state]
        text = Text(line.text)  # plain text without markup: it may hold prompts
        if line.state != "pass":
            text.append(f"\n→ {line.fix}", style=style)
        shown = line.area if line.area != area else ""
        table.add_row(Text(mark, style=style), shown, Text(line.name), text)
        area = line.area
    episode = [_episode(report.episode)] if report.episode else []
    return Group(*parts, table, *episode, _verdict(report))


def _episode(rows: Sequence[TokenRow]) -> Table:
    """Every token of an episode, but for the middle of what one side wrote at length."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("\ntoken", justify="right")
    table.add_column("\ntext", overflow="fold")
    table.add_column("\nwritten by")
    table.add_column("\ntrained on")
    for writer, written in groupby(rows, key=lambda row: row.writer):
        run = list(written)
        left_out = range(SHOWN // 2, len(run) - SHOWN // 2)
        for place, row in enumerate(run):
            if place not in left_out:
                mark = Text("yes", style="green") if row.trained else Text("no", style="dim")
                table.add_row(str(row.token), Text(row.text), writer, mark)
            elif place == left_out.start:
                table.add_row("…", Text(f"{len(left_out)} more", style="dim"), writer)
    return table


def _verdict(report: Report) -> Text:
    fail, warn, passed = (len(report.of(state)) for state in ("fail", "warn", "pass"))
    counts = {counted(fail, "failure"): fail, counted(warn, "warning"): warn, f"{passed} passed": 1}
    summary = ", ".join(text for text, count in counts.items() if count)
    end = "ready to run" if report.ok else "fix the failures first"
    style = "bold green" if report.ok else "bold red"
    return Text(f"\n{summary} in {report.seconds:.1f} s: {end}", style=style)
