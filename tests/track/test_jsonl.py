"""metrics.jsonl: every record there or not there, whatever happens to the process or the disk."""

import json
import math
from pathlib import Path

import pytest

from posttrain.runs import read_metrics
from posttrain.track import JsonlTracker, Stage


def stage(folder: Path) -> Stage:
    return Stage(name="rl", folder=folder, total_steps=3)


def write(folder: Path, steps: range) -> None:
    tracker = JsonlTracker(stage(folder))
    for step in steps:
        tracker.log(step, {"reward/mean": step / 4, "loss/total": -1.0})
    tracker.close()


def test_one_line_for_each_call_and_every_line_is_json(tmp_path: Path) -> None:
    tracker = JsonlTracker(stage(tmp_path / "rl"))
    tracker.log(1, {"reward/mean": 0.5, "rollout/tokens": 12})
    lines = (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.5, "rollout/tokens": 12.0}
    ]  # and it was there before close
    tracker.log(1, {"eval/accuracy": 1.0})
    tracker.close()
    tracker.close()
    assert [record["step"] for record in read_metrics(tmp_path / "rl")] == [1, 1]


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "e": 5e-324}
    tracker = JsonlTracker(stage(tmp_path))
    tracker.log(7, values)
    tracker.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["a"] == "NaN"
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record.pop("a"))
    assert record == {"step": 7, **{name: values[name] for name in "bcde"}}


def test_a_line_torn_anywhere_is_skipped_and_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(2))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [record["step"] for record in read_metrics(path)] == [0]
        write(tmp_path, range(1, 3))
        assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]


@pytest.mark.parametrize("kept", [b"", b'{"step": 0}\n'])
def test_a_long_torn_line_is_cut(kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(kept + b"x" * 300_000)
    JsonlTracker(stage(tmp_path)).close()
    assert path.read_bytes() == kept


def test_a_finished_file_is_only_ever_appended_to(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, range(2, 3))
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = JsonlTracker(stage(tmp_path))
    tracker.log(1, {"a": 1.0})
    file = tracker._file

    class Full:
        closed = False
        truncate, fileno = file.truncate, file.fileno

        def write(self, data: bytes) -> int:
            file.write(data[:5])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        tracker.log(2, {"a": 2.0})
    monkeypatch.setattr(tracker, "_file", file)
    tracker.log(3, {"a": 3.0})
    tracker.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_a_metric_may_not_be_called_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(stage(tmp_path))
    with pytest.raises(ValueError, match="'step' is the step's own name"):
        tracker.log(1, {"step": 2.0})
    tracker.close()
