"""What sets trackers apart; what all of them keep stands in tests/contract/test_trackers.py."""

import dataclasses
import importlib.util
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.registry import resolve
from posttrain.track import TRACKERS, Dropped, Several, Stage
from posttrain.track.diagnosis import Diagnosing
from posttrain.track.sample_table import log_samples, sample_rows
from posttrain.types import Prompt, Rollout, Score, Turn


class FakeRun:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.logged, self.finished = options, [], False
        self.id = "a1b2"

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    table = types.SimpleNamespace  # with ``columns`` and ``data``
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Table=table))
    return runs


def stage(folder: Path) -> Stage:
    return Stage(name="rl", folder=folder / "run" / "rl", total_steps=2, config={"steps": 2})


def test_several_closes_all_and_then_says_what_failed() -> None:
    calls = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            calls.append((self.name, step, dict(metrics)))

        def close(self) -> None:
            calls.append((self.name, "close"))
            if self.name == "a":
                raise OSError("disk full")

    tracker = Several([Recorder("a"), Recorder("b")])
    tracker.log(1, {"x": 2.0})
    assert calls == [("a", 1, {"x": 2.0}), ("b", 1, {"x": 2.0})]
    with pytest.raises(OSError, match="disk full"):
        tracker.close()
    assert calls[2:] == [("a", "close"), ("b", "close")]


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TRACKERS["tensorboard"](stage(tmp_path))
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "rl" / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.5)]


def test_wandb_is_given_the_stage_and_the_numbers(
    tmp_path: Path, wandb_runs: list[FakeRun]
) -> None:
    spec = {"name": "wandb", "project": "sums", "mode": "offline"}
    tracker = resolve(spec, TRACKERS, kind="tracker")(stage(tmp_path))
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    (run,) = wandb_runs
    given = {"project": "sums", "mode": "offline", "group": "run", "name": "run/rl"}
    assert given.items() <= run.options.items()
    assert run.options["config"] == {"steps": 2}
    assert Path(run.options["dir"]).is_dir()
    assert run.logged == [(3, {"reward/mean": 0.5})]
    assert run.finished


def test_a_stage_that_goes_on_continues_its_curves(
    tmp_path: Path, wandb_runs: list[FakeRun]
) -> None:
    """TensorBoard hides what comes again; wandb takes up the run it had."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = [TRACKERS[name](stage(tmp_path)) for name in ("tensorboard", "wandb")]
    again = dataclasses.replace(stage(tmp_path), steps_before=1)
    for step in (1, 2):
        first[0].log(step, {"reward/mean": 0.25})
    for tracker in first:
        tracker.close()
    time.sleep(1.1)  # event files are told apart by the second
    second = [TRACKERS[name](again) for name in ("tensorboard", "wandb")]
    second[0].log(2, {"reward/mean": 0.5})
    for tracker in second:
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "rl" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.5)]
    one, other = wandb_runs
    assert (one.options["id"], one.options["resume"]) == (None, None)
    assert (other.options["id"], other.options["resume"]) == (one.id, "allow")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"{name} is not installed; run `pip install 'posttrain"):
        TRACKERS[name](stage(tmp_path))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_importing_a_tracker_loads_no_optional_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.find_spec(f"posttrain.track.{name}")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'every_steps'"):
        resolve({"name": "console", "every_step": 5}, TRACKERS, kind="tracker")


def test_rollouts_go_to_trackers_as_tables(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    """Every ten steps, through all that is wrapped around one; what was written stays text."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    evil = "<script>a|b</script>\x1b[31m"
    turn = Turn(tokens=(5,), text=evil, logprobs=(0.0,))
    score = Score(value=1.0, parts={"numeric": 1.0})
    asked = Prompt(id="0", text="1+1=")
    rollout = Rollout(prompt=asked, turns=(turn,), group=0, score=score)
    made = [TRACKERS[name](stage(tmp_path)) for name in ("tensorboard", "wandb")]
    wrapped = [Dropped(each, name="x", used={"x": True}) for each in made]
    tracker = Diagnosing(Several([*wrapped, Bare()]), tmp_path)
    for step in (9, 10):
        log_samples(tracker, step, rows=lambda: sample_rows([rollout], [0.5]))
    tracker.close()
    (run,) = wandb_runs
    ((step, logged),) = run.logged
    table = logged["rollouts"]
    assert step == 10
    assert table.columns == ["prompt", "completion", "reward", "numeric", "advantage", "stop"]
    assert table.data == [["1+1=", evil, 1.0, 1.0, 0.5, "stop"]]
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "rl" / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("rollouts/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "&lt;script&gt;a&#124;b" in text
    assert "\x1b" not in text


class Bare:
    """A tracker that takes numbers alone."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
