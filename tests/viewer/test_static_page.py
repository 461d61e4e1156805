"""A run as one file: it loads nothing, is harmless whatever it holds, and says what it lacks."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs import RunFolder
from posttrain.runs.metrics_file import metrics_csv
from posttrain.viewer.shelf import Shelf
from posttrain.viewer.static_page import export, key_of, render


class Page(HTMLParser):
    """The scripts, styles and references of a page, and the answers inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.inside: dict[str, str] = {}
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [name for name, _ in attrs if name in ("src", "href") or name[:2] == "on"]
        self._in = tag if dict(attrs).get("id") != "data" else "data"

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        self.inside[self._in] = self.inside.get(self._in, "") + data

    @property
    def answers(self) -> dict[str, Any]:
        return json.loads(self.inside["data"])["answers"]


def rendered(folder: Path) -> tuple[str, Page]:
    text = render(Shelf([folder]))
    return text, Page(text)


def test_it_loads_nothing_and_runs_one_script_of_ours(hostile: Path) -> None:
    text, page = rendered(hostile)
    assert sorted(set(page.tags)) == [
        "body",
        "div",
        "head",
        "html",
        "meta",
        "script",
        "style",
        "title",
    ]
    assert page.tags.count("script") == 2  # the data, and the page's own
    assert page.refers == []
    assert not set("\x1b\u202e") & set(text)
    (policy,) = re.findall(r'Security-Policy" content="([^"]+)"', text)
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.inside[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(text) < 1_000_000  # three completions of 300,000 characters are cut


def test_what_the_page_asks_is_inside(runs: Path) -> None:
    _, page = rendered(runs / "first")
    answers = page.answers
    charts = answers[key_of("charts", run="first", stage="rl")]
    assert [chart["key"] for chart in charts["charts"]][:2] == ["reward", "held_out"]
    assert charts["results"][0]["label"] == "held-out accuracy (numeric)"
    groups = answers[key_of("groups", run="first")]["groups"]
    assert {group["step"] for group in groups} == {1, 2, 3, 4, 5, 6}
    member = groups[0]["members"][0]
    place = {"step": groups[0]["step"], "group": groups[0]["group"], "sample": member["sample"]}
    tokens = answers[key_of("rollout", run="first", **place)]
    assert "".join(tokens["texts"]).startswith(member["completion"])
    explained = [key for key in answers if key.startswith("explain?")]
    assert len(explained) > 10
    assert all(answers[key]["agrees"] for key in explained)
    rollouts = [key for key in answers if key.startswith("rollout?")]
    assert len(explained) == len(rollouts)  # there is room for the arithmetic of all
    assert answers[key_of("compare", run="first", limit=25)]["problems"] == 10


def test_what_cannot_be_read_is_said_in_its_place(hostile: Path) -> None:
    (hostile / "rl" / "before.jsonl").write_text("{}\n")
    (hostile / "rl" / "rollouts" / "step-000002.parquet").write_bytes(b"no")
    _, page = rendered(hostile)
    answers = page.answers
    assert "cannot be read" in answers[key_of("compare", run="hostile", limit=25)]["error"]
    groups = answers[key_of("groups", run="hostile")]
    assert list(groups["problems"]) == ["step-000002.parquet"]
    assert {group["step"] for group in groups["groups"]} == {1, 3}
    (hostile / "rl" / "metrics.jsonl").write_text("no\n")
    _, page = rendered(hostile)
    assert "expected" in page.answers[key_of("charts", run="hostile", stage="rl")]["error"]


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a", config={"rl": {}})
    _, page = rendered(tmp_path / "a")
    assert page.answers[key_of("charts", run="a", stage="rl")]["charts"] == []


def test_the_files_lie_beside_the_page(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(runs / "first")
    written = export(run, tmp_path / "out" / "my.html")
    assert [path.name for path in written] == ["my.html", "my-sft-metrics.csv", "my-rl-metrics.csv"]
    first, *rows = csv.reader(io.StringIO(written[2].read_text()))
    assert first[0] == "step"
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5", "6"]
    with pytest.raises(ValueError, match="is a folder; name the file"):
        export(run, tmp_path)


def test_a_spreadsheet_finds_no_formula() -> None:
    records = [{"step": 1, "=1+1": 2.0, "a": -1.0}, {"step": 2, "a": float("inf")}]
    assert metrics_csv(records) == "step,'=1+1,a\n1,2.0,-1.0\n2,,inf\n"
