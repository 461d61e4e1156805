"""One page for each algorithm, from the table, the docstrings of its pieces and metrics of a run.

    python scripts/site/algorithm_pages.py    # runs each algorithm two steps, for its metrics

writes ``algorithm_metrics.json`` beside this file: the names that each logs and not all others do.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

from posttrain.algorithms.pieces import asks_teacher
from posttrain.algorithms.table import (
    ALGORITHMS,
    PieceKind,
    algorithm,
    difference,
    pieces,
    real_piece,
)
from posttrain.cli.explain_pieces import docstring_paragraphs

ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).with_name("algorithm_metrics.json")
_MARK = "<!-- Written by `make pages` from the table of algorithms: change the code, not this. -->"
_ROW = re.compile(r"^\| (`[a-z_]+/.*?) \| (.*?) \|(.*)\|$", re.M)


def algorithm_pages() -> dict[str, str]:
    """The pages by file name, in the order of the table."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    explained = _explained()
    return {f"{name}.md": _page(name, measured[name], explained) for name in ALGORITHMS}


def command(name: str) -> str:
    """A command that runs two steps of an algorithm, with the tiny model and its own defaults."""
    row = algorithm(name)
    found = (real_piece(row.advantage["name"], "advantage"), real_piece(row.loss["name"], _LOSS))
    teacher = " --teacher.model tiny" if asks_teacher(*found) else ""
    return (
        f"posttrain rl --rl.algorithm {name}{teacher} --task.name arithmetic --rl.steps 2 "
        f"--rl.max_new_tokens 4 --run.folder runs/{name}"
    )


_LOSS: PieceKind = "policy loss"


def _pieces_of(name: str) -> list[tuple[PieceKind, str]]:
    row = algorithm(name)
    found: list[tuple[PieceKind, str]] = [
        ("advantage", row.advantage["name"]),
        (_LOSS, row.loss["name"]),
        ("averaging", row.weights["name"]),
    ]
    return [*found, ("value loss", row.value_loss["name"])] if row.value_loss else found


def _page(name: str, metrics: list[str], explained: dict[str, str]) -> str:
    row = algorithm(name)
    lines = [
        f"# {name}",
        "",
        _MARK,
        "",
        f"{row.title} ({_reference(row.reference)}).",
        "",
        "```text",
    ]
    lines += [*row.equation.splitlines(), "```", "", "```bash", command(name), "```", ""]
    lines += ["## Pieces and defaults", "", "| | |", "|---|---|"]
    lines += [f"| {piece} | `{value}` |" for piece, value in pieces(name).items()]
    if row.penalty_target is not None:
        lines.append(f"| penalty target | `{row.penalty_target}` |")
    lines += ["", "Each can be set: [`[rl]`](../configuration.md#rl), `--rl.loss.clip_high 0.28`."]
    for kind, piece in _pieces_of(name):
        lines += ["", f"### {kind}: {piece}"]
        for paragraph in docstring_paragraphs(piece, kind):
            lines += ["", _escaped(paragraph)]
    lines += ["", "## What sets it apart", ""]
    for other in row.neighbours:
        apart = difference(name, other).items()
        lines += ["", f"| | {name} | [{other}]({other}.md) |", "|---|---|---|"]
        lines += [f"| {piece} | `{one}` | `{another}` |" for piece, (one, another) in apart]
    lines += ["", "## Metrics of its own", ""]
    if metrics:
        lines += ["Beside [those of every run](../metrics.md):", "", "| metric | |", "|---|---|"]
        lines += [f"| `{metric}` | {explained.get(metric, '')} |" for metric in metrics]
    else:
        lines.append("None beside [those of every run](../metrics.md).")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _reference(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _escaped(text: str) -> str:
    """Prose of a docstring whose stars, bars and brackets are no markup."""
    return re.sub(r"([*_|<\[\]])", r"\\\1", text)


def _explained() -> dict[str, str]:
    """What docs/metrics.md says of each metric."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for names, formula, meaning in _ROW.findall(page):
        text = re.sub(r"\]\((\w+\.md)", r"](../\1", f"{formula}:{meaning}")
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), text.strip(": "))
    return found


def measured_metrics() -> dict[str, list[str]]:
    """The metrics that each algorithm's command logs, without those that all of them do."""
    logged = {name: _logged(name) for name in ALGORITHMS}
    everywhere = set.intersection(*logged.values())
    return {name: sorted(found - everywhere) for name, found in logged.items()}


def _logged(name: str) -> set[str]:
    from posttrain.cli.app import main

    with tempfile.TemporaryDirectory() as scratch:
        words = shlex.split(command(name))[1:]
        words[words.index("--run.folder") + 1] = scratch + "/run"
        sys.argv = ["posttrain", *words, "--check", "off", "--run.threads", "1"]
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{name}: its command failed") from stop
        lines = (Path(scratch) / "run/rl/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)}


if __name__ == "__main__":
    MEASURED.write_text(json.dumps(measured_metrics(), indent=1) + "\n", encoding="utf-8")
