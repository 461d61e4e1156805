"""A run as one HTML file that needs nothing else, and its numbers as CSV.

Whatever stands in a run folder was written by models and by strangers: every piece of it is
escaped, the page may load and run nothing, and a part that cannot be read is said to be so.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from posttrain.runs.drift import settings
from posttrain.runs.files import read_json, write_text
from posttrain.runs.filters import Filter
from posttrain.runs.folder import RunFolder
from posttrain.runs.held_out import Interval, held_out
from posttrain.runs.metrics import Record, merge_steps, to_columns
from posttrain.runs.overview import BROKEN, Overview, overview
from posttrain.runs.plot import end_note
from posttrain.runs.store import Rollouts
from posttrain.runs.svg import draw_panels
from posttrain.track.shown import duration
from posttrain.track.text import counted, printable

NUM_ROLLOUTS = 12  # of the first step, and of the last
MAX_TEXT = 2000  # characters of a prompt or a completion
TITLES = {
    "sft": "Supervised fine-tuning",
    "prefer": "Preferences",
    "reward": "Reward model",
    "rl": "Reinforcement learning",
    "eval": "Evaluation",
}
_MARKS: dict[Any, tuple[str, str]] = {
    True: ("good", " ✓"),
    False: ("bad", " ✗"),
    None: ("", " ?"),  # its grader broke
}
_NUMBERS = ("reward", "advantage")
_NUMBER = ' class="number"'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def export(run: RunFolder, out: str | Path | None = None) -> list[Path]:
    """Write ``report.html`` (or ``out``) and beside it ``report-STAGE-metrics.csv`` for each stage.

    Returns what was written, the page first. By default it goes into the run folder.
    """
    page = Path(out) if out is not None else run.path / "report.html"
    if page.is_dir():
        raise ValueError(f"{page}: is a folder; name the file, like {page / 'report.html'}")
    write_text(page, render_report(run))
    written = [page]
    for stage in TITLES:
        records = _records(run, stage)
        if records:
            beside = page.with_name(f"{page.stem}-{stage}-metrics.csv")
            write_text(beside, metrics_csv(records))
            written.append(beside)
    return written


def metrics_csv(records: Sequence[Record]) -> str:
    """One row for each step, one column for each metric; empty where it was not logged."""
    columns = to_columns(merge_steps(records))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    # A name may hold anything; a spreadsheet takes a cell that begins like this for a formula.
    names = map(printable, columns)
    table.writerow([f"'{name}" if name.startswith(tuple("=+-@")) else name for name in names])
    table.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def render_report(run: RunFolder) -> str:
    """The page: results, curves, what went wrong, samples, config."""
    row = overview(run.path)
    name = _text(run.path.resolve().name)
    parts = [
        f"<h1>{name}</h1>",
        f'<p class="note">{_text(_subtitle(row))}</p>',
        *([f'<p class="bad">{_text(row.problem)}</p>'] if row.problem else []),
        _section("", lambda: _cards(run, row)),
        _section("", lambda: _ways(run)),
        _section("Held-out rewards", lambda: _rewards(run)),
        *(_section(title, _curves(run, stage)) for stage, title in TITLES.items()),
        _section("Diagnosis", lambda: _findings(run)),
        _section("Held-out answers", lambda: _answers(run)),
        _section("Rollouts", lambda: _rollouts(run)),
        _section("Config", lambda: _config(run)),
    ]
    css = files("posttrain.runs").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _section(title: str, body: Callable[[], str]) -> str:
    try:
        content = body()
    except BROKEN as error:
        content = f'<p class="bad">cannot be read: {_text(error)}</p>'
    heading = f"<h2>{_text(title)}</h2>\n" if title else ""
    return f"<section>\n{heading}{content}\n</section>" if content else ""


def _subtitle(row: Overview) -> str:
    stages = " → ".join(row.stages) or "no stage is done yet"
    algorithm = f" · {row.algorithm}" if row.algorithm else ""
    return f"{row.state} · {stages}{algorithm}"


def _cards(run: RunFolder, row: Overview) -> str:
    facts = {
        share.label: share.note or _change(share.before, share.after)
        for share in held_out(run).shares().values()
    }
    over = "step" if row.reward_steps == 1 else f"{row.reward_steps} steps"
    rewards = (row.reward_first, row.reward_last)
    facts |= {
        f"training reward, first → last {over}": _arrow(
            None if value is None else f"{value:.3g}" for value in rewards
        ),
        "steps": None if row.steps_done is None else f"{row.steps_done:,}",
        "time": None if row.seconds is None else duration(row.seconds),
    }
    cards = [
        f'<div class="card"><span>{_text(name)}</span><b>{_text(value)}</b></div>'
        for name, value in facts.items()
        if value is not None
    ]
    notes = [f'<p class="note">{_text(note)}</p>' for note in held_out(run).notes()]
    return f'<div class="cards">{"".join(cards)}</div>{"".join(notes)}' if cards else ""


def _ways(run: RunFolder) -> str:
    """How each stage samples and learns."""
    lines = [f"{stage} {line}" for stage, line in ways_of(run).items()]
    return "".join(f'<p class="note">{_text(line)}</p>' for line in lines)


def ways_of(run: RunFolder) -> dict[str, str]:
    """How each stage that trains says that it samples and learns, in a line."""
    written = {stage: run.stage(stage).ways for stage in TITLES}
    return {stage: str(read_json(path)["line"]) for stage, path in written.items() if path.exists()}


def _rewards(run: RunFolder) -> str:
    """Every reward on held-out problems, monitored ones too."""
    rows = []
    for name, (before, after) in held_out(run).means().items():
        moved = None if before is None or after is None else after - before
        cells = [_number(before, "{:.3f}"), _number(after, "{:.3f}")]
        change = _number(moved, "{:+.3f}")
        rows.append([_cell(name.removeprefix("held-out ")), *cells, change])
    numbers = ("before", "after", "change")
    return _table(["mean over held-out problems", *numbers], rows, numbers=numbers)


def _change(before: Interval | None, after: Interval | None) -> str | None:
    return _arrow(None if share is None else f"{share.value:.1%}" for share in (before, after))


def _arrow(values: Iterable[str | None]) -> str | None:
    return " → ".join(value for value in values if value is not None) or None


def _curves(run: RunFolder, stage: str) -> Callable[[], str]:
    def draw() -> str:
        records = merge_steps(run.stage(stage).records())
        accuracy_by = run.stage(stage).accuracy_by
        figures = draw_panels(records, accuracy_by=accuracy_by) if records else []
        return f'<div class="curves">{"".join(figures)}</div>{_ends(records)}' if figures else ""

    return draw


def _ends(records: Sequence[Record]) -> str:
    """Over what the numbers beside curves are means."""
    over = end_note(records)
    return f'<p class="note">{_text(over)}</p>' if over else ""


def _findings(run: RunFolder) -> str:
    shown = []
    for finding in run.findings():
        until = finding.get("until")
        steps = f"{finding['stage']}, step {finding['step']}"
        steps += " to the end" if until is None else f", cleared at step {until}"
        remedy = f" {_text(finding['remedy'])}" if until is None else ""
        shown.append(
            f'<div class="finding"><b>{_text(finding["finding"])}</b> '
            f'<span class="note">{_text(steps)}</span>'
            f"<p>{_text(finding['text'])}.{remedy}</p></div>"
        )
    if not shown and any(run.stage(stage).metrics.exists() for stage in TITLES):
        return '<p class="note">Nothing was found wrong.</p>'
    return "\n".join(shown)


def _answers(run: RunFolder) -> str:
    rows = []
    for sample in run.samples[:50]:
        cells = [_cell(sample["prompt"])]
        if sample.get("answer") is not None:
            cells[0] = _cell(f"{sample['prompt']}\n→ {sample['answer']}")
        for when in ("before", "after"):
            right, reward = sample.get(f"right_{when}", ""), sample.get(f"reward_{when}")
            mark, sign = _MARKS.get(right, ("", ""))
            if right is None and isinstance(reward, int | float):  # nothing checks answers
                sign = f"  [{reward:.3g}]"
            cells.append(_cell(f"{sample[when]}{sign}", mark=mark))
        rows.append(cells)
    drawn = (run.summary or {}).get("answers_shown", "") if rows else ""
    note = f'<p class="note">{_text(drawn)}</p>' if drawn else ""
    return note + _table(["prompt → expected", "before", "after"], rows)


def _rollouts(run: RunFolder) -> str:
    folder = run.stage("rl").rollouts
    if not folder.is_dir():
        return ""
    store = Rollouts(folder)
    steps = store.steps
    parts = [
        f'<p class="note">{counted(len(store), "rollout")} of {counted(len(steps), "step")}'
        f"{_text(f'; {len(store.problems)} files cannot be read' if store.problems else '')}</p>"
    ]
    chosen = {
        f"Step {step}": Filter(first_step=step, last_step=step)
        for step in steps[:1] + steps[1:][-1:]
    }
    chosen["Broken scores"] = Filter(state="broken")
    for title, where in chosen.items():
        rows = [
            [
                _cell(row["prompt"]),
                _cell(row["completion"]),
                _number(row["reward"], "{:.3g}"),
                _number(row["advantage"], "{:+.2f}"),
                _cell(row["reason"] if row["state"] != "ok" else row["stop_reason"]),
            ]
            for row in store.page(where, limit=NUM_ROLLOUTS).rows
        ]
        if rows:
            headings = ["prompt", "completion", "reward", "advantage", "end"]
            parts.append(f"<h3>{_text(title)}</h3>{_table(headings, rows)}")
    return "\n".join(parts) if steps else ""


def _config(run: RunFolder) -> str:
    rows = [[_cell(name), _cell(value)] for name, value in settings(run.config).items()]
    shown = (
        f"<details><summary>Every setting</summary>{_table(['setting', 'value'], rows)}</details>"
    )
    if run.recipe is not None:
        shown += f"<details><summary>The recipe</summary><pre>{_text(run.recipe)}</pre></details>"
    return shown


def _records(run: RunFolder, stage: str) -> list[Record]:
    """The records of a stage; none where they cannot be read, which the page says."""
    try:
        return run.stage(stage).records()
    except BROKEN:
        return []


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = _NUMBERS
) -> str:
    if not rows:
        return ""
    head = "".join(
        f"<th{_NUMBER if heading in numbers else ''}>{_text(heading)}</th>" for heading in headings
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _cell(value: Any, *, mark: str = "") -> str:
    return f'<td class="text {mark}">{_text(value)}</td>'


def _number(value: Any, pattern: str) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"<td{_NUMBER}>{pattern.format(value) if known else '–'}</td>"


def _text(value: Any) -> str:
    """Harmless characters, line by line; what is very long loses its middle."""
    text = "" if value is None else str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 2 :]}"
    return html.escape("\n".join(printable(line) for line in text.split("\n")))
