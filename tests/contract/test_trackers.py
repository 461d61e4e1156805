"""What every tracker keeps: any numbers in any order, and an end that can be reached twice."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.protocols import Tracker
from posttrain.track import TRACKERS, Several, Stage
from posttrain.track.diagnosis import Diagnosing

LOGGED = [
    (0, {"eval/accuracy": 0.25}),
    (1, {}),
    (1, {"reward/mean": float("nan"), "a user's own": float("inf")}),
    (2, {"reward/mean": 0.5, "": -0.0, "name\x1b[31m": 1e300}),
    (5, {"reward/part/format": 1}),  # past the end, as a resumed run may be
]


class FakeWandb:
    """Takes what the library would send elsewhere."""

    id = "a1b2"

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


def several(stage: Stage) -> Tracker:
    return Several([TRACKERS["console"](stage), TRACKERS["jsonl"](stage)])


def diagnosing(stage: Stage) -> Tracker:
    return Diagnosing(TRACKERS["jsonl"](stage), stage.folder)


MAKERS: dict[str, Callable[[Stage], Tracker]] = {
    **TRACKERS,
    "several": several,
    "diagnosing": diagnosing,
}


@pytest.fixture(params=MAKERS)
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Stage], Tracker]:
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
    fake = types.SimpleNamespace(init=lambda **options: FakeWandb())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return MAKERS[request.param]


def stage(folder: Path, **options: Any) -> Stage:
    return Stage(name="rl", folder=folder / "run" / "rl", total_steps=2, **options)


def test_it_takes_any_numbers_and_leaves_them_as_they_are(
    make: Callable[[Stage], Tracker], tmp_path: Path
) -> None:
    tracker = make(stage(tmp_path))
    for step, metrics in LOGGED:
        before = dict(metrics)
        tracker.log(step, metrics)
        assert list(metrics) == list(before)
    tracker.close()


def test_it_may_be_closed_at_once_and_begun_again(
    make: Callable[[Stage], Tracker], tmp_path: Path
) -> None:
    """As a run that is cut short before its first step, and goes on later."""
    make(stage(tmp_path)).close()
    tracker = make(stage(tmp_path, steps_before=1))
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    written = tmp_path / "run" / "rl" / "metrics.jsonl"
    if written.exists():
        assert json.loads(written.read_text()) == {"step": 2, "reward/mean": 0.5}
