"""A run as one file that opens from disk: the same page, with what it would ask a server inside.

The file loads nothing. All that a model or a stranger wrote stands in it as JSON in which no
character is a tag's, and is shown as text; the policy lets run the one script of ours, by its hash.
It goes to others: settings and messages name no folder of this machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from posttrain import __version__
from posttrain.report.facts import TITLES, RunFacts
from posttrain.report.overview import BROKEN
from posttrain.runs import Filter, RunFolder, write_text
from posttrain.runs.metrics_file import metrics_csv
from posttrain.track.local_paths import settings_without_folders, without_folders
from posttrain.viewer.group_pages import group_page, groups_of
from posttrain.viewer.page_answers import ANSWERS
from posttrain.viewer.shelf import NotRecordedError, Shelf, ShownRun, UnknownError
from posttrain.viewer.values import finite
from posttrain.viewer.won_and_lost import KINDS

NUM_STEPS = 10  # steps of which groups are written, the first and the last among them
NUM_GROUPS = 6  # groups of each, those whose rewards differ most
MAX_BYTES = 6_000_000  # of rollouts and arithmetic; what comes later is left out
UNREADABLE = (*BROKEN, UnknownError, NotRecordedError)
MESSAGES = {"error", "findings", "missing", "notes", "problem", "problems", "reason", "ways"}
SETTINGS = {"all", "differing"}


def export(run: RunFolder, out: str | Path | None = None) -> list[Path]:
    """Write ``report.html`` (or ``out``) and beside it ``report-STAGE-metrics.csv`` for each stage.

    Returns what was written, the page first. By default it goes into the run folder.
    """
    page = Path(out) if out is not None else run.path / "report.html"
    write_page([run.path], page)
    written, facts = [page], RunFacts(run)
    for stage in TITLES:
        try:
            records = facts.records(stage)
        except BROKEN:  # the page names the file that cannot be read
            continue
        if records:
            written.append(page.with_name(f"{page.stem}-{stage}-metrics.csv"))
            write_text(written[-1], metrics_csv(records))
    return written


def write_page(folders: list[Path], out: Path) -> None:
    """Write runs as one page."""
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; name the file, like {out / 'report.html'}")
    write_text(out, render(Shelf(folders)))


def render(shelf: Shelf) -> str:
    """The page, with the answers to what it can ask."""
    known = Known(shelf)
    known.ask("runs")
    runs = shelf.look()
    for run in runs:
        _ask_all(known, run)
        for other in runs:
            if run is not other:
                known.ask("settings", many=f"{run.name}\n{other.name}")
                for kind in ("", *KINDS):
                    known.ask("compare", run=run.name, other=other.name, kind=kind, limit=25)
    content = {"answers": known.answers, "written": __version__}
    data = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    script, style = _asset("app.js"), _asset("app.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>posttrain</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="app"></div>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@dataclass
class Known:
    """Answers by what was asked, as the page asks it; an error where a part cannot be read."""

    shelf: Shelf
    answers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folders = [run.folder for run in self.shelf.look()]

    def ask(self, name: str, **asked: Any) -> Any:
        """Ask as the page would, and keep the answer."""
        given = {key: str(value) for key, value in asked.items() if value != ""}
        return self.keep(lambda: ANSWERS[name](self.shelf, given), name, **asked)

    def keep(self, make: Callable[[], Any], name: str, **asked: Any) -> Any:
        """Keep an answer under what would be asked for it."""
        try:
            found = make()
        except UNREADABLE as error:
            found = {"error": f"cannot be read: {error}"}
        found = self._public(found)
        self.answers[key_of(name, **asked)] = found
        return found

    def _public(self, found: Any, key: str = "") -> Any:
        """An answer whose settings and messages name no folder of this machine."""
        if isinstance(found, dict):
            return {
                each: self._public(value, key if key in MESSAGES | SETTINGS else each)
                for each, value in found.items()
            }
        if isinstance(found, list):
            return [self._public(value, key) for value in found]
        if isinstance(found, str) and key in MESSAGES:
            return without_folders(found, *self._folders)
        if isinstance(found, str) and key in SETTINGS:
            return _setting(found)
        return found


def _ask_all(known: Known, run: ShownRun) -> None:
    """All that the page can ask of a run, within bounds."""
    name = run.name
    for stage in ("rl", "sft", "dpo", "reward"):
        known.ask("charts", run=name, stage=stage)
    known.ask("settings", run=name)
    for kind in ("", *KINDS):
        known.ask("compare", run=name, kind=kind, limit=25)
    if not (run.folder / "rl" / "rollouts").is_dir():
        return
    groups = known.keep(lambda: _groups(run), "groups", run=name).get("groups", [])
    for sort, unsolved in (("best", ""), ("best", "1"), ("change", "")):
        known.ask("prompts", run=name, limit=50, sort=sort, unsolved=unsolved)
    for step in sorted({group["step"] for group in groups}):
        known.ask("step", run=name, step=step)
    _ask_rollouts(known, run, groups=groups)


def _groups(run: ShownRun) -> dict[str, Any]:
    """Groups of steps all over the training, and groups with broken scores."""
    store = run.rollouts()
    groups, steps = groups_of(store), store.steps
    if not steps:
        return group_page(store, groups, where=Filter(), limit=0)
    places = np.unique(np.linspace(0, len(steps) - 1, NUM_STEPS).round().astype(int))
    pages = [
        group_page(
            store,
            groups,
            where=Filter(first_step=steps[place], last_step=steps[place]),
            sort="spread",
            descending=True,
            limit=NUM_GROUPS,
        )
        for place in places
    ]
    pages.append(group_page(store, groups, where=Filter(state="broken"), limit=NUM_GROUPS))
    found = {(g["step"], g["group"]): g for page in pages for g in page["groups"]}
    shown = [found[key] for key in sorted(found)]
    return {**pages[0], "groups": shown, "total": len(shown)}


def _ask_rollouts(known: Known, run: ShownRun, *, groups: list[dict[str, Any]]) -> None:
    """The tokens of the groups' rollouts and their arithmetic, until the file is full.

    The arithmetic of the best and the worst of each group comes before that of the others.
    """
    places: list[tuple[str, dict[str, Any]]] = []
    later: list[tuple[str, dict[str, Any]]] = []
    for group in groups:
        members = sorted(group["members"], key=lambda each: -(each["advantage"] or 0.0))
        outer = [each["sample"] for each in (members[:1] + members[-1:])]
        for each in group["members"]:
            place = {name: each[name] for name in ("step", "group", "sample")}
            places.append(("rollout", place))
            (places if each["sample"] in outer else later).append(("explain", place))
    used = 0
    for name, place in (*places, *later):
        if used < MAX_BYTES:
            used += len(json.dumps(known.ask(name, run=run.name, **place)))


def _setting(written: str) -> str:
    """A setting as JSON, or a word in the place of one, without folders."""
    try:
        value = json.loads(written)
    except ValueError:
        return written
    return json.dumps(settings_without_folders(value), ensure_ascii=False)


def key_of(name: str, **asked: Any) -> str:
    """The name of an answer, as the page asks for it.

    >>> key_of("charts", stage="rl", run="my run", kind="")
    'charts?run=my%20run&stage=rl'
    """
    given = sorted((key, str(value)) for key, value in asked.items() if value != "")
    return f"{name}?" + "&".join(f"{key}={quote(value, safe=_SAFE)}" for key, value in given)


_SAFE = "-_.!~*'()"  # what JavaScript's encodeURIComponent leaves


def _asset(name: str) -> str:
    text = files("posttrain.viewer").joinpath("static", name).read_text(encoding="utf-8")
    return text.strip()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
