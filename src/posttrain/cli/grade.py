"""``posttrain grade``: scores the rows of a file with a reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from posttrain.config import GradingSection
from posttrain.config.read import parse_value
from posttrain.config.specs import complete_reward
from posttrain.track.printable import counted, printable
from posttrain.track.progress import loading
from posttrain.track.safe_terminal import Terminal

if TYPE_CHECKING:
    from posttrain.build.grade_file import Graded


def grade(
    reward: str, path: Path, *, arguments: Sequence[str], out: Path | None, grading: GradingSection
) -> None:
    """Grade a file, write the rows with their scores, and print a summary."""
    options = _options(arguments)
    # Mistakes are reported before anything is loaded.
    complete_reward(reward, {"weight": 1.0, **options})
    with loading():
        from posttrain.build.grade_file import check_out, grade_file

    if out is not None:
        check_out(out, path)  # checked now, not after an hour of grading
    console = Terminal()
    columns = ("grading", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        graded = grade_file(reward, path, options=options, grading=grading, progress=progress)
    if out is not None:
        graded.write(out)
    console.print(_table(graded, title=f"{reward}, {counted(len(graded.scores), 'row')}"))
    for problem in graded.misread:
        console.print(Text(printable(problem, limit=200)), soft_wrap=True)
    first = next((score for score in graded.scores if not score.ok), None)
    if first is not None:
        console.print(Text(f"the first broken one: {printable(first.reason, limit=400)}"))
    if graded.advice:
        console.print(Text(printable(graded.advice), style="yellow"), soft_wrap=True)
    if out is not None:
        console.print(Text(f"{out}: written"))
    if graded.all_broken:
        raise ValueError(
            f"grade: every row of {path} is broken, none has a score: {graded.all_broken}. "
            "Fix the reward, its options or the columns of the file"
        )


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """``--extract boxed --partial=true`` as options of the reward."""
    options: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ValueError(f"grade: expected an option of the reward, got {word!r}")
        if not equals:
            if not rest:
                raise ValueError(f"grade: --{name} needs a value")
            value = rest.pop(0)
        options[name.replace("-", "_")] = parse_value(value)
    return options


def _table(graded: Graded, *, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(printable(title))
    table.add_column("", justify="right")
    for state, count in sorted(graded.states.items(), key=lambda pair: pair[0] != "ok"):
        table.add_row(state, f"{count:,}")
    if not graded.all_broken:
        table.add_row("mean score (ok only)", f"{graded.mean:.4f}")
        table.add_row("full marks", graded.told_full_marks)
    if graded.workers_died:
        table.add_row("workers that died and were replaced", f"{graded.workers_died:,}")
    table.add_row("slowest", f"{max(score.seconds for score in graded.scores):.3f} s")
    table.add_row("grades per second", f"{len(graded.scores) / graded.seconds:,.0f}")
    return table
