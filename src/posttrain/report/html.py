"""A run as one HTML file that needs nothing else, and its numbers as CSV.

The content of a run folder is untrusted, as models and strangers wrote it: every piece of it is
escaped, the page may load and run nothing, and it names a part that cannot be read.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from posttrain.report.episode_text import exchange
from posttrain.report.facts import SIGNS, TITLES, RunFacts, describe_finding, number_or_none
from posttrain.report.overview import BROKEN, Overview, arrow, overview
from posttrain.report.panels import end_note, panels_of
from posttrain.report.svg import draw_panel
from posttrain.runs.drift import settings
from posttrain.runs.files import write_text
from posttrain.runs.filters import Filter
from posttrain.runs.folder import RunFolder
from posttrain.runs.metrics_file import Record, merge_steps, to_columns
from posttrain.runs.store import Rollouts
from posttrain.track.printable import counted, harmless, printable
from posttrain.track.shown import duration

NUM_ROLLOUTS = 12  # rollouts of the first step, and of the last
MAX_TEXT = 2000  # characters of a prompt or a completion
MAX_TURN = 500  # of one turn of several
_COLOURS = {True: "good", False: "bad"}
_NUMBER = ' class="number"'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def export(run: RunFolder, out: str | Path | None = None) -> list[Path]:
    """Write ``report.html`` (or ``out``) and beside it ``report-STAGE-metrics.csv`` for each stage.

    Returns what was written, the page first. By default it goes into the run folder.
    """
    page = Path(out) if out is not None else run.path / "report.html"
    if page.is_dir():
        raise ValueError(f"{page}: is a folder; name the file, like {page / 'report.html'}")
    facts = RunFacts(run)
    write_text(page, render_report(facts))
    written = [page]
    for stage in TITLES:
        try:
            records = facts.records(stage)
        except BROKEN:  # the page names the file that cannot be read
            continue
        if records:
            written.append(page.with_name(f"{page.stem}-{stage}-metrics.csv"))
            write_text(written[-1], metrics_csv(records))
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


def render_report(facts: RunFacts) -> str:
    """The page: results, curves, what went wrong, samples, config."""
    row = overview(facts.run.path, facts)
    name = _text(facts.name)
    stages = " → ".join(row.stages) or "no stage is done yet"
    algorithm = f" · {row.algorithm}" if row.algorithm else ""
    parts = [
        f"<h1>{name}</h1>",
        _note(f"{row.state} · {stages}{algorithm}"),
        f'<p class="bad">{_text(row.problem)}</p>' if row.problem else "",
        _section("", lambda: _cards(facts, row)),
        _section("", lambda: "".join(_note(f"{stage} {way}") for stage, way in facts.ways.items())),
        _section("Held-out rewards", lambda: _rewards(facts)),
        *(_section(title, _curves(facts, stage)) for stage, title in TITLES.items()),
        _section("Diagnosis", lambda: _findings(facts)),
        _section("Held-out answers", lambda: _answers(facts)),
        _section("Rollouts", lambda: _rollouts(facts.run)),
        _section("Config", lambda: _config(facts.run)),
    ]
    css = files("posttrain.report").joinpath("page.css").read_text(encoding="utf-8")
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


def _cards(facts: RunFacts, row: Overview) -> str:
    rows = {
        share.label: share.note or arrow(*share.values, pattern="{:.1%}")
        for share in facts.held_out.shares().values()
    }
    over = "step" if row.reward_steps == 1 else f"{row.reward_steps} steps"
    reward = arrow(row.reward_first, row.reward_last, pattern="{:.3g}")
    rows |= {f"training reward, first → last {over}": reward}
    rows |= {"steps": "" if row.steps_done is None else f"{row.steps_done:,}"}
    rows |= {"time": "" if row.seconds is None else duration(row.seconds)}
    cards = [
        f'<div class="card"><span>{_text(name)}</span><b>{_text(value)}</b></div>'
        for name, value in rows.items()
        if value
    ]
    notes = "".join(map(_note, facts.held_out.notes()))
    return f'<div class="cards">{"".join(cards)}</div>{notes}' if cards else ""


def _rewards(facts: RunFacts) -> str:
    """Every reward on held-out problems, monitored ones too."""
    rows = []
    for name, (before, after) in facts.held_out.means().items():
        moved = None if before is None or after is None else after - before
        cells = [_number(before, "{:.3f}"), _number(after, "{:.3f}"), _number(moved, "{:+.3f}")]
        rows.append([_cell(name.removeprefix("held-out ")), *cells])
    return _table(["mean over held-out problems", "before", "after", "change"], rows)


def _curves(facts: RunFacts, stage: str) -> Callable[[], str]:
    def draw() -> str:
        records = facts.records(stage)
        panels = panels_of(records, accuracy_by=facts.run.stage(stage).accuracy_by)
        figures = "".join(draw_panel(drawn, records) for drawn in panels)
        return f'<div class="curves">{figures}</div>{_note(end_note(records))}' if figures else ""

    return draw


def _findings(facts: RunFacts) -> str:
    shown = []
    for finding in facts.findings:
        steps, text = describe_finding(finding)
        where = f"{finding['stage']}, {steps}"
        shown.append(
            f'<div class="finding"><b>{_text(finding["finding"])}</b> '
            f'<span class="note">{_text(where)}</span>'
            f"<p>{_text(text)}</p></div>"
        )
    if not shown and any(facts.run.stage(stage).metrics.exists() for stage in TITLES):
        return _note("Nothing was found wrong.")
    return "\n".join(shown)


def _answers(facts: RunFacts) -> str:
    rows = []
    for sample in facts.samples[:50]:
        answer = sample.get("answer")
        cells = [_cell(sample["prompt"] if answer is None else f"{sample['prompt']}\n→ {answer}")]
        for when in ("before", "after"):
            right, reward = sample.get(f"right_{when}", ""), sample.get(f"reward_{when}")
            sign = SIGNS.get(right, "")
            if right is None and isinstance(reward, int | float):  # no reward checks answers
                sign = f"  [{reward:.3g}]"
            turns = sample.get(f"turns_{when}")
            cells.append(_said(sample[when], turns, sign=sign, mark=_COLOURS.get(right, "")))
        rows.append(cells)
    note = _note(facts.summary.get("answers_shown", "")) if rows else ""
    return note + _table(["prompt → expected", "before", "after"], rows)


def _rollouts(run: RunFolder) -> str:
    folder = run.stage("rl").rollouts
    if not folder.is_dir():
        return ""
    store = Rollouts(folder)
    steps = store.steps
    unread = f"; {len(store.problems)} files cannot be read" if store.problems else ""
    parts = [_note(f"{counted(len(store), 'rollout')} of {counted(len(steps), 'step')}{unread}")]
    chosen = {
        f"Step {step}": Filter(first_step=step, last_step=step)
        for step in steps[:1] + steps[1:][-1:]
    }
    chosen["Broken scores"] = Filter(state="broken")
    for title, where in chosen.items():
        rows = [
            [
                _cell(row["prompt"]),
                _said(row["completion"], row["turns"]),
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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, empty without rows; headings are aligned like the cells below them."""
    if not rows:
        return ""
    kinds = [_NUMBER if cell.startswith(f"<td{_NUMBER}") else "" for cell in rows[0]]
    head = "".join(
        f"<th{kind}>{_text(heading)}</th>" for kind, heading in zip(kinds, headings, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _cell(value: Any, *, mark: str = "") -> str:
    return f'<td class="text {mark}">{_text(value)}</td>'


def _said(
    completion: str, turns: Sequence[Mapping[str, Any]] | None, *, sign: str = "", mark: str = ""
) -> str:
    """What was said behind a prompt; of an episode each turn, with who wrote it and its reward."""
    if not turns:
        return _cell(f"{completion}{sign}", mark=mark)
    *rows, (last, answer, earned) = exchange(turns)
    lines = []
    for who, text, reward in [*rows, (last, f"{answer}{sign}", earned)]:
        label = f"<i>{who}{f' · earned {reward}' if reward else ''}</i>"
        lines.append(f'<div class="turn {who}">{label}{_text(text, limit=MAX_TURN)}</div>')
    return f'<td class="text {mark}">{"".join(lines)}</td>'


def _number(value: Any, pattern: str) -> str:
    known = number_or_none(value)
    return f"<td{_NUMBER}>{'–' if known is None else pattern.format(known)}</td>"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>' if text else ""


def _text(value: Any, *, limit: int = MAX_TEXT) -> str:
    """Harmless characters, line by line; what is very long loses its middle."""
    text = "" if value is None else str(value)
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return html.escape(harmless(text))
