"""A trace is one that viewers read: the phases, units and names of the Trace Event Format."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run, timeless
from trace_format import check_format

from posttrain.distributed.spans import Span, Spans
from posttrain.distributed.timelines.chrome_trace import TraceFile, trace_events
from posttrain.distributed.timelines.timeline import Recorded


def rows_of(*spans: Span) -> dict[str, list[dict[str, Any]]]:
    return check_format({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"})


def test_times_are_microseconds_from_the_first() -> None:
    rows = rows_of(
        Span("learner 0", "step", 1_700_000_001.5, 1_700_000_001.75),
        Span("driver", "sync", 1_700_000_000.0, 1_700_000_000.000001),
    )
    assert [(e["ts"], e["dur"]) for e in rows["driver"]] == [(0, 1)]
    assert [(e["ts"], e["dur"]) for e in rows["learner 0"]] == [(1_500_000, 250_000)]


def test_rows_stand_by_kind_and_number() -> None:
    names = ["engine 10", "grading", "engine 9", "other", "learner 1", "driver", "learner 0"]
    rows = rows_of(*(Span(who, "work", 0.0, 1.0) for who in names))
    assert list(rows) == [
        *("driver", "learner 0", "learner 1", "engine 9", "engine 10", "grading", "other"),
    ]


def test_what_only_overlaps_gets_a_row_of_its_own_and_what_is_inside_does_not() -> None:
    rows = rows_of(
        Span("engine 0", "whole", 0.0, 10.0),
        Span("engine 0", "part", 0.0, 4.0),
        Span("engine 0", "part", 4.0, 10.0),
        Span("engine 0", "late", 9.0, 12.0),
        Span("engine 0", "later", 11.0, 13.0),
        Span("engine 0", "again", 12.5, 12.75),
    )
    shown = {name: [event["name"] for event in events] for name, events in rows.items()}
    assert shown == {
        "engine 0": ["whole", "part", "part", "later", "again"],
        "engine 0 (2)": ["late"],
    }


def test_the_file_holds_the_last_steps_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("posttrain.distributed.timelines.chrome_trace.time.time", lambda: now[0])
    spans = Spans()
    file = TraceFile(tmp_path / "trace.json", spans, steps=2, pause=0.0)
    for step in range(5):
        spans.add(Span("driver", f"step {step}", float(step), step + 1.0))
        now[0] = step + 1.0
        file.stepped()
    trace = json.loads((tmp_path / "trace.json").read_text())
    (row,) = check_format(trace).values()
    assert [event["name"] for event in row] == ["step 3", "step 4"]
    assert trace["otherData"] == {
        "begun": "1970-01-01T00:00:03+00:00",
        "spans": 2,
        "left out": 3,
    }


def test_what_was_over_before_the_stage_is_left_out(tmp_path: Path) -> None:
    spans = Spans()
    spans.add(Span("learner", "sft", 0.0, 5.0))
    spans.add(Span("learner", "rl", 5.0, 6.0))
    TraceFile(tmp_path / "trace.json", spans, begun=5.0).write()
    rows = check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert [event["name"] for event in rows["learner"]] == ["rl"]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.distributed.timelines.chrome_trace.MOST", 10)
    spans = Spans()
    for number in range(100):
        spans.add(Span("driver", str(number), number, number + 1))
    TraceFile(tmp_path / "trace.json", spans).write()
    trace = json.loads((tmp_path / "trace.json").read_text())
    (row,) = check_format(trace).values()
    assert [event["name"] for event in row] == [str(number) for number in range(90, 100)]
    assert trace["otherData"]["left out"] == 90


def test_names_of_a_model_or_a_user_stay_text(tmp_path: Path) -> None:
    spans = Spans()
    spans.add(Span('driver "\n</script>', "\ud800 é", 0.0, 1.0))
    TraceFile(tmp_path / "trace.json", spans).write()
    json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json", Spans()).write()
    assert check_format(json.loads((tmp_path / "trace.json").read_text())) == {}


def test_a_recorded_part_is_the_part() -> None:
    class Counter:
        count = 0

        def add(self, by: int = 1) -> int:
            """Add."""
            self.count += by
            return self.count

    part, spans = Counter(), Spans()
    recorded: Any = Recorded(part, spans, who="counter", names={"add": "adding"})
    assert recorded.add(by=2) == 2
    recorded.count = 7
    assert part.count == recorded.count == 7
    assert recorded.add.__doc__ == "Add."
    assert [(span.who, span.what) for span in spans.all()] == [("counter", "adding")]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_in_one_process_has_a_timeline(max_lag: int, tmp_path: Path) -> None:
    rl = {"steps": 4, "max_lag": max_lag, "evaluate_every": 2}
    given = recipe(tmp_path / "run", sft=None, eval=None, rl=rl)
    plain, _ = small_run({**given, "run": {**given["run"], "folder": str(tmp_path / "plain")}})
    assert not (tmp_path / "plain" / "rl" / "trace.json").exists()
    given["run"]["trace"] = True
    done, _ = small_run(given)
    rows = check_format(json.loads((tmp_path / "run" / "rl" / "trace.json").read_text()))
    names = {row: {event["name"] for event in events} for row, events in rows.items()}
    assert list(rows) == ["driver", "learner", "engine", "grading"]
    assert {f"step {step}" for step in (1, 2, 3, 4)} < names["driver"]
    assert {"waiting for a batch", "sync", "evaluating", "after the step"} < names["driver"]
    assert "optimiser step" in names["learner"]
    assert (names["engine"], names["grading"]) == ({"sampling"}, {"grading"})
    assert sum(event["name"] == "grading" for event in rows["grading"]) == 4
    # Watched or not, the run is the same.
    records = [timeless(each.folder.stage("rl").records()) for each in (plain, done)]
    assert records[0] == records[1]
