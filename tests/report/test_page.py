"""A run as a page: well formed, self-contained, and harmless whatever a model wrote."""

import csv
import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console

from posttrain.report import RunFacts, export, render_summary
from posttrain.report import render_report as render_facts
from posttrain.report.facts import SIGNS
from posttrain.report.html import metrics_csv
from posttrain.runs import RunFolder, rollout_file, write_json, write_rollouts
from posttrain.runs.rollouts import turn_rows
from posttrain.track import Stage
from posttrain.track.jsonl import JsonlTracker
from posttrain.types import Prompt, Rollout, Score, Turn
from posttrain.types.marks import Marks

EVIL = "</td><script>alert(1)</script>\x1b[31m\u202e<img src=x onerror=a()>"
VOID = {"meta", "line", "polyline", "circle", "br"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a page loads or runs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href") or name[:2] == "on"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def render_report(run: RunFolder) -> str:
    return render_facts(RunFacts(run))


def evaluated(share: float) -> dict[str, Any]:
    """What a stage records of an evaluation."""
    estimates = {"accuracy": {"value": share, "low": 0.0, "high": 1.0}}
    parts = {EVIL: share, "seen": share - 0.5}
    return {"estimates": estimates, "parts": parts, "reward": share, "of": "x", "invalid": 0.0}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in which every text that can be hostile is."""
    config = {"rl": {"algorithm": EVIL, "steps": 50, EVIL: EVIL}}
    run = RunFolder.create(tmp_path / "<b>run", config=config, recipe=f"# {EVIL}")
    stage = run.begin("rl")
    tracker = JsonlTracker(Stage(name="rl", folder=stage.path, total_steps=50))
    for step in range(1, 51):
        numbers = {"reward/mean": step / 50, "eval/accuracy": 0.5, "rollout/length": 3.0}
        tracker.log(step, {**numbers, "loss/total": float("nan"), EVIL: 1.0})
    tracker.close()
    finding = {"step": 3, "finding": EVIL, "text": EVIL, "remedy": EVIL, "until": None}
    write_json(stage.path / "one.json", finding)
    line = " ".join((stage.path / "one.json").read_text().split("\n"))
    (stage.path / "diagnosis.jsonl").write_text(line + "\n")
    for step in (1, 2, 3):
        rollouts = [
            Rollout(
                prompt=Prompt(id=EVIL, text=f"prompt of {step} {EVIL}"),
                turns=(
                    Turn(
                        tokens=(1,), logprobs=(0.0,), text=EVIL * 500, stop_reason="stop", version=0
                    ),
                ),
                group=0,
                score=Score(value=0.0, state=state, reason=EVIL),
            )
            for state in ("ok", "crashed")
        ]
        write_rollouts(rollout_file(stage.rollouts, step), rollouts, step=step)
    run.write_samples(
        [{"prompt": EVIL, "before": EVIL, "after": EVIL, "answer": EVIL, "right_after": True}]
    )
    marks = Marks(check=EVIL, weights={EVIL: 1.0, "seen": 0.0})
    stage.write_marks(marks)
    run.finish("rl", digest="a", record={"before": evaluated(0.25)})
    run.begin("eval").write_marks(marks)
    run.finish("eval", digest="a", record={"after": evaluated(0.75)})
    run.write_summary({"seconds": 61.0, "answers_shown": f"1 of 9, drawn at random {EVIL}"})
    return run


def test_the_page_is_well_formed_and_runs_and_loads_nothing(run: RunFolder) -> None:
    text = render_report(run)
    page = Page(text)
    assert not page.tags & {"script", "img", "b>run", "link", "iframe", "object"}
    assert page.links == []
    assert "default-src 'none'" in text
    assert not set("\x1b\u202e") & set(text)
    assert "http" not in text.replace("http-equiv", "")
    assert len(text) < 200_000  # half a million characters of completions are cut


def test_the_page_shows_what_there_is(run: RunFolder) -> None:
    said = "\n".join(Page(render_report(run)).text)
    for words in (
        "<b>run",
        "held-out accuracy (</td><script>",
        "25.0% → 75.0%",
        "training reward, first → last 5 steps",
        "0.06 → 0.96",  # the means of 0.02 to 0.1, and of 0.92 to 1
        "seen (monitored)",
        "-0.250",
        "+0.500",
        "1 of 9, drawn at random",
        "Reinforcement learning",
        "Held-out accuracy (</td><script>",
        "numbers: mean of the last 5 steps; held-out ones: the last evaluation",
        "step 3 to the end",
        "6 rollouts of 3 steps",
        "Step 1",
        "Step 3",
        "Broken scores",
        "prompt of 3",
        "rl.steps",
        "<script>alert(1)</script>\\x1b[31m\\u202e",
    ):
        assert words in said, words
    assert "Step 2" not in said


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path) -> None:
    """Who wrote what, and what each turn earned; a long one loses its middle, none its escapes."""

    def turn(text: str, **more: Any) -> Turn:
        return Turn(tokens=(5,), text=text, **more)

    asked = [turn("4", logprobs=(0.0,)), turn(f"\n{EVIL}\n", reward=-0.25)]
    turns = [*asked * 5, turn("6" * 5000, logprobs=(0.0,))]
    prompt, score = Prompt(id="0", text="1 to 7?"), Score(value=-0.25)
    rollouts = [
        Rollout(prompt=prompt, turns=tuple(these), group=0, score=score)
        for these in ([*asked, turn("6", logprobs=(0.0,))], turns)
    ]
    run = RunFolder.create(tmp_path / "run", config={}, recipe="")
    stage = run.begin("rl")
    write_rollouts(rollout_file(stage.rollouts, 1), rollouts, step=1)
    short, long = map(turn_rows, rollouts)
    sample = {"prompt": "1 to 7?", "before": "4\n6", "after": "4", "right_before": False}
    run.write_samples([{**sample, "turns_before": short, "turns_after": long}])
    text = render_report(run)
    said = Page(text).text
    assert not Page(text).tags & {"script", "img"}
    first = said.index("policy · earned -0.25")
    assert said[first : first + 5] == ["policy · earned -0.25", "4", "environment", ANY, "policy"]
    assert said[first + 3].startswith("</td><script>")
    assert said.count("… 3 more turns …") == 2
    assert "policy · earned +1" in said
    assert f"6{SIGNS[False]}" in said
    assert "6" * 251 not in text
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render_summary(RunFacts(run)))
    shown = console.export_text()
    assert "policy: 4 (earned -0.25)" in shown
    assert "environment: </td><script>alert(1)</script>\\x1b[31m\\u202e" in shown
    assert "policy: 6 ✗" in shown


def test_what_cannot_be_read_is_said_in_its_place(run: RunFolder) -> None:
    (run.path / "samples.json").write_text("[[")
    (run.stage("rl").path / "diagnosis.jsonl").write_text("{}\n")
    rollout_file(run.stage("rl").rollouts, 2).write_bytes(b"no")
    said = "\n".join(Page(render_report(run)).text)
    assert said.count("cannot be read: ") == 2
    assert "; 1 files cannot be read" in said
    (run.stage("rl").metrics).write_text("no\n")
    (run.path / "config.json").write_text("3")
    assert "Step 1" in "\n".join(Page(render_report(run)).text)
    assert [path.name for path in export(run)] == ["report.html"]


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a", config={"rl": {}})
    assert "no stage is done yet" in "".join(Page(render_report(run)).text)


def test_the_files_lie_beside_the_page(run: RunFolder, tmp_path: Path) -> None:
    written = export(run, tmp_path / "out" / "my.html")
    assert [path.name for path in written] == ["my.html", "my-rl-metrics.csv"]
    first, *rows = csv.reader(io.StringIO(written[1].read_text()))
    assert first[:3] == ["step", "reward/mean", "eval/accuracy"]
    assert rows[9][:3] == ["10", "0.2", "0.5"]
    assert len(rows) == 50
    with pytest.raises(ValueError, match="is a folder; name the file"):
        export(run, tmp_path)


def test_a_spreadsheet_finds_no_formula() -> None:
    records = [{"step": 1, "=1+1": 2.0, "a": -1.0}, {"step": 2, "a": float("inf")}]
    assert metrics_csv(records) == "step,'=1+1,a\n1,2.0,-1.0\n2,,inf\n"


def test_the_held_out_loss_stands_beside_the_loss(tmp_path: Path) -> None:
    """A second curve in the panel, within its axis, and its last value in the caption."""
    run = RunFolder.create(tmp_path / "run", config={"sft": {}})
    stage = run.begin("sft")
    tracker = JsonlTracker(Stage(name="sft", folder=stage.path, total_steps=3))
    tracker.log(0, {"test/loss": 4.0})
    for step in (1, 2, 3):
        tracker.log(step, {"loss/total": 1.0 / step, "test/loss": 4.0 - step / 2})
    tracker.close()
    text = render_report(run)
    Page(text)
    assert "0.333, held-out 2.5" in text
    (line,) = (part for part in text.split("<polyline ") if 'class="held-out"' in part)
    points = [
        tuple(map(float, p.split(","))) for p in line.split('points="')[1].split('"')[0].split()
    ]
    assert len(points) == 4
    assert all(0 <= x <= 320 and 0 <= y <= 150 for x, y in points)
    assert points[0][1] < points[-1][1]  # it falls, and y grows downwards


@pytest.mark.parametrize("values", [(0.0, 0.0), (-3.0, -3.0), (1e-12, 1e-12), (4.63771, 4.63868)])
def test_the_numbers_beside_a_flat_curve_can_be_told_apart(
    values: tuple[float, float], tmp_path: Path
) -> None:
    """And a curve that does not move at all lies in the middle of its picture."""
    run = RunFolder.create(tmp_path / "run", config={"sft": {}})
    tracker = JsonlTracker(Stage(name="sft", folder=run.begin("sft").path, total_steps=2))
    for step, value in enumerate(values, start=1):
        tracker.log(step, {"loss/total": value})
    tracker.close()
    text = render_report(run)
    points = text.split('class="curve"')[1].split('points="')[1].split('"')[0].split()
    heights = [float(point.split(",")[1]) for point in points]
    if values[0] == values[1]:
        assert heights == pytest.approx([69.0, 69.0], abs=0.1)
    labels = [part.split("<")[0] for part in text.split('text-anchor="end">')[1:]]
    assert len(set(labels)) == len(labels) > 3
