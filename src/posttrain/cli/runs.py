"""``posttrain runs`` and ``posttrain export``: what runs there are, and one of them as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from posttrain.report import (
    compare,
    export,
    find_runs,
    overview,
    render_comparison,
    render_runs,
)
from posttrain.runs import RunFolder
from posttrain.track.safe_terminal import Terminal, say, say_json


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
        console.print(render_comparison(rows, differing))
    else:
        console.print(render_runs(rows, names=_names(paths, asked), width=console.width))


def _names(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Names of runs: their paths relative to the folder that was searched."""
    if len(folders) > 1 or paths[0] == folders[0]:
        return [str(path) for path in paths]
    return [str(path.relative_to(folders[0])) for path in paths]


def export_run(folder: Path, *, out: Path | None) -> None:
    """Write a run as one HTML file, and its numbers as CSV; say where they are."""
    for path in export(RunFolder(folder), out):
        say(f"{path}: written")
