"""Torn checkpoints, signals and full disks: nothing is lost, and the end is the same."""

import errno
import io
import itertools
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import GRPO, cut, given, go, same
from rich.console import Console
from small_runs import same_weights, timeless

from posttrain.build.setup import Supplied
from posttrain.config import recipe_from_dict
from posttrain.disk import NotWrittenError
from posttrain.learn import learner as learner_module
from posttrain.learn.learner import LocalLearner
from posttrain.protocols import Objective, StepResult
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import checkpoints
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.folder import RunFolder
from posttrain.runs.interrupts import Interrupts, Stopped
from posttrain.runs.manifest import write_manifest
from posttrain.stages.run import run
from posttrain.types import Batch


@pytest.mark.parametrize("tear", ["cut", "flip", "gone", "manifest", "metrics"])
def test_a_torn_checkpoint_is_left_out(
    tmp_path: Path, stopped: dict[str, Any], tear: str, uninterrupted: RunFolder
) -> None:
    """Whatever has happened to the newest, the one before it is used; and the end is the same."""
    rl = RunFolder(tmp_path / "cut").stage("rl")
    assert checkpoint_steps(rl) == [2, 4]
    newest = rl.checkpoint(4)
    moments = newest / "optimizer.safetensors"
    if tear == "cut":
        moments.write_bytes(moments.read_bytes()[:-1])
    if tear == "flip":
        content = bytearray(moments.read_bytes())
        content[-9] ^= 1
        moments.write_bytes(content)
    if tear == "gone":
        (newest / "model" / "model.safetensors").unlink()
    if tear == "manifest":
        (newest / "manifest.json").write_bytes(b"")
    if tear == "metrics":
        size = checkpoints.read_json(newest / "state.json")["metrics_bytes"]
        rl.metrics.write_bytes(rl.metrics.read_bytes()[: size - 1])
    done, text = go(stopped, resume=True)
    assert f"checkpoint left out: {newest}: " in text
    assert "rl: goes on from step 2" in text
    same(done.folder, uninterrupted)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_checkpoint_of_the_version_before_is_named_and_left_out(
    tmp_path: Path, stage: str
) -> None:
    """It lacks the held-out losses of sft and the greedy completions of rl: that stage starts over.

    Whole by its manifest, and written under the layout of then.
    """
    values = given(tmp_path / "cut", {**GRPO, "max_lag": 1}, sft={"save_every": 4})
    cut(values, save=2 if stage == "sft" else 4)
    old = RunFolder(tmp_path / "cut").stage(stage)
    (step,) = checkpoint_steps(old)
    folder = old.checkpoint(step)
    state = checkpoints.read_json(folder / "state.json")
    state.pop("held_out", None)
    checkpoints.write_json(folder / "state.json", {**state, "layout": 1})
    if stage == "rl":
        waiting = checkpoints.read_json(folder / "waiting.json")
        assert [batch.pop("greedy") for batch in waiting["batches"]]
        checkpoints.write_json(folder / "waiting.json", waiting)
    write_manifest(folder)
    done, text = go(values, resume=True)
    assert f"checkpoint left out: {folder}: was written by another version of posttrain" in text
    assert "layout 1, this one knows 2" in text
    assert f"{stage}: starts over" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    same(done.folder, go(values)[0].folder)


def test_skipped_steps_are_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of RL is skipped, a checkpoint follows: what goes on from it remembers."""
    step = LocalLearner.step

    def ill(self: LocalLearner, batch: Batch, objective: Objective, **more: Any) -> StepResult:
        if batch.advantages is not None and self.version == 1:
            batch.advantages.fill_(math.nan)
        return step(self, batch, objective, **more)

    monkeypatch.setattr(LocalLearner, "step", ill)
    values = given(tmp_path / "cut", GRPO)
    cut(values, save=2)
    done, text = go(values, resume=True)
    assert "rl: goes on from step 2" in text
    records = done.folder.stage("rl").records()
    assert [r["train/skipped_total"] for r in records if r["step"]] == [0, 1, 1, 1, 1, 1]
    whole = go(given(tmp_path / "whole", GRPO))[0].folder.stage("rl")
    assert str(timeless(records)) == str(timeless(whole.records()))  # NaN is not NaN
    assert same_weights(done.model, whole.model)


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest, and the best by held-out accuracy; each with a model for other tools."""
    values = given(tmp_path / "run", {**GRPO, "save_every": 2, "steps": 8})
    values["run"] |= {"keep_last": 1, "keep_best": 1}
    done, _ = go(values)
    rl = done.folder.stage("rl")
    accuracy = {r["step"]: r["eval/accuracy"] for r in rl.records() if "eval/accuracy" in r}
    best = max((step for step in accuracy if step), key=lambda step: (accuracy[step], step))
    assert checkpoint_steps(rl) == sorted({best, 8})
    assert same_weights(rl.checkpoint(8) / "model", rl.model)
    assert not [path for path in rl.checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked to stop in step 2: it is finished, saved although none was due, and said."""
    values = given(tmp_path / "cut", {"steps": 4}, eval=None, rewards=None)
    calls = itertools.count(1)  # no value, unlike a number: the reward that counts stays the same

    def spread(completion: str) -> float:
        if next(calls) == 20:
            signal.raise_signal(number)
        return sum(map(ord, completion)) % 11 / 11

    supplied = Supplied(rewards=RewardScorer({spread: 1.0}))
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(Stopped) as stop:
        run(recipe_from_dict(values), supplied, console=console)
    assert (stop.value.number, stop.value.saved) == (number, 2)
    assert "finishing this step" in capfd.readouterr().err
    assert "stopped after step 2, which is saved; to go on: call" in str(stop.value)
    done, text = go(values, supplied=supplied, resume=True)
    assert "rl: goes on from step 2" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, supplied=supplied)
    same(done.folder, whole.folder)


def test_a_stop_that_was_turned_into_another_error_is_a_stop() -> None:
    """Python 3.11 raises RuntimeError for whatever is raised while a class is being made."""

    def stopped() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    with pytest.raises(Stopped) as stop, Interrupts():
        stopped()
    assert stop.value.number == signal.SIGTERM
    with pytest.raises(OSError, match="disk"), Interrupts():  # an error of its own stays one
        raise OSError("disk")


def test_two_signals_stop_at_once(tmp_path: Path) -> None:
    """The step is left in the middle, the handlers are what they were, and the run can go on."""
    values = given(tmp_path / "cut", {"steps": 4}, eval=None, rewards=None)

    def impatient(completion: str) -> float:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        go(values, supplied=Supplied(rewards=RewardScorer({impatient: 1.0})))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert RunFolder(tmp_path / "cut").stage("rl").records() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_leaves_no_half_file(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, uninterrupted: RunFolder
) -> None:
    """The second checkpoint cannot be written: the first stays, and the error says what to do."""
    values = given(tmp_path / "cut", GRPO)
    calls = 0
    whole_save = learner_module.save_learner

    def failing(learner: Any, folder: Path) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        numbers = whole_save(learner, folder)
        if calls == 2:
            raise OSError(code, "No room", str(folder / "optimizer.safetensors"))
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "save_learner", failing)
        with pytest.raises(NotWrittenError, match=r"cannot be written: .*, then .*resume"):
            go(values)
    rl = RunFolder(tmp_path / "cut").stage("rl")
    assert [path.name for path in rl.checkpoints.iterdir()] == ["step-000002"]
    done, _ = go(values, resume=True)
    same(done.folder, uninterrupted)
