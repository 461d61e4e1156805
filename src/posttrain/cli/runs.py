"""``posttrain runs`` and ``posttrain export``: what runs there are, and one of them as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from posttrain.runs import Overview, compare, find_runs, overview, printable
from posttrain.track.terminal import Terminal, say, say_json

STYLES = {"finished": "green", "running": "cyan", "unfinished": "yellow", "broken": "bold red"}
REWARD_IS = "reward: of training, means of the first and the last tenth of the steps (ten at most)"
CELL = 60  # characters of a setting
WORDS = {"state": 0, "stages": 110, "algorithm": 90}  # columns, and how wide a screen they want


def show_runs(folders: Sequence[Path], *, as_json: bool) -> None:
    """List the runs of folders; of two runs or more that are named, show how they differ."""
    asked = list(folders) or [Path("runs")]
    paths = list(dict.fromkeys(path for folder in asked for path in find_runs(folder)))
    named = len(asked) > 1 and all((path / "run.json").exists() for path in asked)
    rows = [overview(path) for path in paths]
    differing = compare(paths) if named else {}
    if as_json:
        found = {"runs": [asdict(row) for row in rows]} | ({"config": differing} if named else {})
        say_json(found)
        return
    console = Terminal()
    if not rows:
        console.print(Text(f"{asked[0]}: holds no runs; posttrain run RECIPE.toml makes one"))
        return
    if named:
        console.print(_compared(rows, differing))
    else:
        console.print(_listed(rows, names=_names(paths, asked), width=console.width))


def _names(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """What to call each: the way to it from the folder that was searched."""
    if len(folders) > 1 or paths[0] == folders[0]:
        return [str(path) for path in paths]
    return [str(path.relative_to(folders[0])) for path in paths]


def _listed(rows: Sequence[Overview], *, names: Sequence[str], width: int) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    words = [word for word, needed in WORDS.items() if width >= needed]
    numbers = ("steps", "held-out", "reward", "time")
    table.add_column("run", overflow="fold", min_width=10)
    for word in words:
        table.add_column(word, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=number != "held-out", overflow="fold")
    broken = []
    for row, name in zip(rows, names, strict=True):
        if row.problem:
            broken.append(Text(f"{printable(name)}: {printable(row.problem, limit=300)}"))
        cells = {
            "state": Text(row.state, style=STYLES[row.state]),
            "stages": Text(printable(" ".join(row.stages)) or "-"),
            "algorithm": Text(printable(row.algorithm or "-", limit=30)),
        }
        cells |= {key: Text(number) for key, number in _numbers(row).items()}
        table.add_row(Text(printable(name)), *(cells[key] for key in (*words, *numbers)))
    return Group(table, Text(REWARD_IS, style="dim"), *broken)


def _compared(rows: Sequence[Overview], differing: Mapping[str, list[str]]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", style="dim")
    for row in rows:
        table.add_column(Text(printable(str(row.path))), justify="right", overflow="fold")
    table.add_row("state", *(Text(row.state, style=STYLES[row.state]) for row in rows))
    numbers = [_numbers(row) for row in rows]
    for name in numbers[0]:
        table.add_row(name, *(Text(each[name]) for each in numbers))
    table.add_section()
    for name, values in differing.items():
        cells = (Text(printable(value, limit=CELL)) for value in values)
        table.add_row(Text(printable(name)), *cells)
    if not differing:
        table.add_row("config", *(Text("the same") for _ in rows))
    problems = [
        Text(f"{row.path}: {printable(row.problem, limit=300)}") for row in rows if row.problem
    ]
    return Group(table, Text(REWARD_IS, style="dim"), *problems)


def _numbers(row: Overview) -> dict[str, str]:
    """The final numbers of a run, as they are shown."""
    done = "-" if row.steps_done is None else f"{row.steps_done:,}"
    of = "" if row.steps is None or row.steps == row.steps_done else f" of {row.steps:,}"
    seconds = "-"
    if row.seconds is not None:
        minutes, rest = divmod(round(row.seconds), 60)
        seconds = f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    return {
        "steps": done + of,
        "held-out": _held_out(row),
        "reward": _change(row.reward_first, row.reward_last, pattern="{:.3g}"),
        "findings": str(row.findings),
        "time": seconds,
    }


def _held_out(row: Overview) -> str:
    """The accuracy and what it goes by; without a check of answers, the shares with full marks."""
    if row.accuracy_by:
        change = _change(row.accuracy_before, row.accuracy_after, pattern="{:.1%}")
        return change if change == "-" else f"{change} accuracy ({printable(row.accuracy_by)})"
    shares = {
        name: _change(before, after, pattern="{:.1%}")
        for name, (before, after) in row.full_marks.items()
    }
    told = [f"{change} full marks of {printable(name)}" for name, change in shares.items()]
    return ", ".join(told) or "-"


def _change(before: float | None, after: float | None, *, pattern: str) -> str:
    first, last = ("-" if value is None else pattern.format(value) for value in (before, after))
    return "-" if first == last == "-" else f"{first} → {last}"


def export_run(folder: Path, *, out: Path | None) -> None:
    """Write a run as one HTML file, and its numbers as CSV; say where they are."""
    from posttrain.runs import RunFolder, export

    for path in export(RunFolder(folder), out):
        say(f"{path}: written")
