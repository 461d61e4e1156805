"""Runs at a glance: every state, and folders that are not what they should be."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.report import compare, find_runs, held_out, overview
from posttrain.runs import RunFolder, write_json, write_sealed
from posttrain.track import Stage
from posttrain.track.jsonl import JsonlTracker
from posttrain.types.marks import Marks

CONFIG = {"run": {"folder": "x", "seed": 0}, "rl": {"algorithm": "grpo", "steps": 4}}


def make(path: Path, *, finished: bool = True, **rl: Any) -> Path:
    """A run folder as a run of four steps would leave it, or one that was stopped after two."""
    config = {"run": {**CONFIG["run"], "folder": str(path)}, "rl": {**CONFIG["rl"], **rl}}
    run = RunFolder.create(path, config=config)
    stage = run.begin("rl")
    tracker = JsonlTracker(Stage(name="rl", folder=stage.path, total_steps=4))
    for step in range(1, 5 if finished else 3):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()
    if finished:
        stage.write_marks(Marks(check="numeric", weights={"numeric": 1.0}))
        before = {"estimates": {"accuracy": {"value": 0.25, "low": 0.2, "high": 0.3}}, "of": "x"}
        run.finish("rl", digest="a", record={"before": before})
        run.begin("eval").write_marks(Marks(check="numeric", weights={"numeric": 1.0}))
        after = {"estimates": {"accuracy": {"value": 0.75, "low": 0.7, "high": 0.8}}, "of": "x"}
        run.finish("eval", digest="a", record={"after": after})
        run.write_summary({"seconds": 61.0})
    return path


def test_a_finished_run(tmp_path: Path) -> None:
    row = overview(make(tmp_path / "a"))
    assert (row.name, row.state, row.stages, row.algorithm) == (
        "a",
        "finished",
        ("rl", "eval"),
        "grpo",
    )
    assert (row.steps_done, row.steps, row.seconds, row.problem) == (4, 4, 61.0, "")
    assert (row.accuracy_by, row.accuracy_before, row.accuracy_after) == ("numeric", 0.25, 0.75)
    assert (row.reward_first, row.reward_last, row.reward_steps) == (0.1, 0.4, 1)


def test_an_unfinished_run_is_running_where_its_lock_is_held(tmp_path: Path) -> None:
    path = make(tmp_path / "a", finished=False)
    row = overview(path)
    assert (row.state, row.steps_done, row.steps, row.accuracy_after) == ("unfinished", 2, 4, None)
    with (path / ".lock").open("w") as lock:
        assert overview(path).state == "unfinished"  # a file alone is no lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert overview(path).state == "running"
    assert overview(path).state == "unfinished"


def test_accuracy_of_a_stage_is_known_before_the_summary(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    (path / "summary.json").unlink()
    (path / "eval" / "done.json").unlink()
    row = overview(path)
    assert (row.state, row.accuracy_before, row.accuracy_after) == ("unfinished", 0.25, None)


def test_evaluations_that_asked_otherwise_are_not_compared(tmp_path: Path) -> None:
    """Another number of problems, or another reward that decides."""
    path = make(tmp_path / "a")
    record = json.loads((path / "rl" / "done.json").read_text())
    record["before"]["of"] = "y"
    write_sealed(path / "rl" / "done.json", record)
    row = overview(path)
    assert (row.accuracy_before, row.accuracy_after) == (None, 0.75)


def test_where_nothing_checks_answers_full_marks_go_by_the_name_of_the_reward(
    tmp_path: Path,
) -> None:
    """And of a reward that gave more than 1, unasked, no share is shown at all."""
    run = RunFolder.create(tmp_path / "a", config={"rl": {}})
    stage = run.begin("eval")
    stage.write_marks(Marks(weights={"short": 1.0, "ten": 1.0, "seen": 0.0}))
    estimates = {"full_marks/short": {"value": 0.5, "low": 0.4, "high": 0.6}}
    parts = {"short": 0.7, "ten": 2.5, "seen": 0.1}
    after = {"estimates": estimates, "above_one": {"ten": 10.0}, "parts": parts, "reward": 3.2}
    run.finish("eval", digest="a", record={"after": after})
    row = overview(run.path)
    assert (row.accuracy_by, row.accuracy_after) == ("", None)
    assert row.full_marks == {"short": (None, 0.5), "ten": (None, None)}
    found = held_out(run)
    assert [(share.label, share.note) for share in found.shares().values()] == [
        ("full marks of short", ""),
        ("full marks of ten", "— (no maximum declared; largest seen 10)"),
    ]
    assert found.means() == {
        "held-out reward, weighted sum": (None, 3.2),
        "held-out short": (None, 0.7),
        "held-out ten": (None, 2.5),
        "held-out seen (monitored)": (None, 0.1),
    }
    assert "ten = { weight = …, maximum = … }" in found.notes()[0]
    assert found.notes()[1].startswith("no accuracy: nothing here checks answers")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", "{}"),
        ("run.json", "[["),
        ("config.json", "[1]"),
        ("config.json", '{"rl": 3, "sft": []}'),
        ("config.json", None),
        ("summary.json", '"text"'),
        ("summary.json", '{"seconds": "long", "accuracy_after": [1]}'),
        ("rl/done.json", "{}"),
        ("rl/done.json", "3"),
        ("rl/metrics.jsonl", "no\n"),
        ("rl/metrics.jsonl", "[]\n"),
        ("rl/diagnosis.jsonl", "{}\n"),
        ("config.json", "[" * 100_000),
    ],
)
def test_whatever_is_in_a_folder_it_is_a_line_and_no_error(
    file: str, content: str | None, tmp_path: Path
) -> None:
    path = make(tmp_path / "a")
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(content)
    row = overview(path)
    assert (row.state == "broken") == bool(row.problem)
    assert row.state in ("broken", "finished")


def test_runs_are_found_at_any_depth_down_to_three(tmp_path: Path) -> None:
    places = ["b", "sweep/a", "sweep/deep/c"]
    paths = [make(tmp_path / place) for place in places]
    make(tmp_path / "one/two/three/four")
    (tmp_path / "notes").mkdir()
    assert find_runs(tmp_path) == paths
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    with pytest.raises(ValueError, match="no such folder; name one that holds runs"):
        find_runs(tmp_path / "nowhere")


def test_only_what_differs_is_compared(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b", algorithm="rloo", group_size=8)
    assert compare([one, other]) == {
        "rl.algorithm": ['"grpo"', '"rloo"'],
        "rl.group_size": ["unset", "8"],
    }
    assert compare([one, make(tmp_path / "c")]) == {}
    write_json(other / "run.json", {"layout": 99})
    assert compare([one, other]) == {}
    third = make(tmp_path / "d", steps=5)
    assert compare([one, other, third]) == {"rl.steps": ["4", "?", "5"]}
    assert json.loads((one / "config.json").read_text())["rl"]["steps"] == 4
