"""Whole runs with a fault injected: NaN, no memory, a second process; and deterministic mode."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import TASK, recipe, same_weights, small_run, timeless

from posttrain.learn.batch_file import read_batch
from posttrain.learn.learner import LocalLearner
from posttrain.pipelines.guard import Skipped
from posttrain.protocols import Objective, Outputs, StepResult
from posttrain.runs import RunFolder
from posttrain.runs.lock import FolderInUseError, held
from posttrain.stages.guards import _Skipped
from posttrain.types import Batch, Terms

step = LocalLearner.step


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Put a NaN into the loss of these optimiser steps, counted from 1."""
    seen: list[int] = []

    def ill(self: LocalLearner, batch: Batch, objective: Objective) -> StepResult:
        seen.append(1)

        def poisoned(outputs: Outputs, part: Batch) -> Terms:
            terms = objective(outputs, part)
            return Terms(loss=terms.loss * math.nan, parts=terms.parts, means=terms.means)

        ill = Objective(poisoned, only_critic=objective.only_critic)
        return step(self, batch, ill if len(seen) in calls else objective)

    monkeypatch.setattr(LocalLearner, "step", ill)


def test_an_injected_nan_is_skipped_counted_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run goes on to its end with a model of numbers."""
    poison(monkeypatch, {10})  # SFT takes 8 steps: this is the second of RL
    done, _ = small_run(recipe(tmp_path / "run"))
    records = done.folder.stage("rl").records()
    assert [record["train/skipped"] for record in records] == [0, 1, 0]
    assert [record["train/skipped_total"] for record in records] == [0, 1, 1]
    place = done.folder.stage("rl").path / "skipped" / "step-000002"
    note = json.loads((place / "minibatch-1.json").read_text())
    assert (note["step"], note["loss"], note["gradient_norm"]) == (2, "NaN", "NaN")
    batch = read_batch(place / "minibatch-1.safetensors")
    assert batch.tokens.shape[0] == len(note["sequences"]) == 16
    assert not note["not_finite"]  # it was the loss, not the batch
    rollouts = done.samples(step=2, limit=16)
    assert [row["reward"] for row in rollouts] == batch.rewards.tolist()
    for row, told in zip(rollouts, note["sequences"], strict=True):
        assert told["chosen"] == row["completion"]
        assert told["text"].endswith(row["completion"])
        assert told["reward"] == row["reward"]
        assert told["advantages"]["most"] == pytest.approx(row["advantage"], rel=1e-5)
    assert all(map(math.isfinite, (records[-1]["loss/total"], records[-1]["train/gradient_norm"])))


def test_a_run_of_nan_stops_and_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(2, 100)))
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"last 2 optimiser steps.*max_skipped = 2") as stopped:
        small_run(recipe(folder, sft={"max_skipped": 2}))
    kept = folder / "sft" / "skipped"
    assert f"kept in {kept}" in str(stopped.value)
    assert sorted(path.name for path in kept.iterdir()) == ["step-000002", "step-000003"]
    records = RunFolder(folder).stage("sft").records()
    assert [r["train/skipped"] for r in records if "train/skipped" in r] == [0, 1, 1]
    assert not (folder / "sft" / "model").exists()


def test_a_batch_that_is_no_number_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sequence, and in which field."""

    def ill(self: LocalLearner, batch: Batch, objective: Objective) -> StepResult:
        if batch.advantages is not None and not calls:
            calls.append(1)
            batch.advantages[3][batch.mask[3]] = math.inf
        return step(self, batch, objective)

    calls: list[int] = []
    monkeypatch.setattr(LocalLearner, "step", ill)
    done, _ = small_run(recipe(tmp_path / "run", sft=None, eval=None))
    note = json.loads((done.folder.path / "rl/skipped/step-000001/minibatch-1.json").read_text())
    assert list(note["not_finite"]) == ["advantages"]
    named = [row for row, told in enumerate(note["sequences"]) if told["not_finite"]]
    assert named == [3]


def scarce(ask: Callable[..., object]) -> Callable[..., object]:
    """The method, as long as the learner is content with 32 tokens."""

    def asked(self: LocalLearner, *given: object, **more: object) -> object:
        if self.micro_batch_tokens > 32:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return ask(self, *given, **more)

    return asked


def test_a_run_short_of_memory_is_the_run_with_less_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the run that was told the smaller size from the start."""
    small, _ = small_run(
        recipe(tmp_path / "small", sft={"micro_batch_tokens": 32}, rl={"micro_batch_tokens": 32})
    )
    for name in ("_outputs", "_in_micro_batches"):  # with gradient, and without
        monkeypatch.setattr(LocalLearner, name, scarce(getattr(LocalLearner, name)))
    sizes = {"micro_batch_tokens": 64}
    with pytest.warns(UserWarning, match="micro_batch_tokens is 32 from here on, was 64"):
        done, _ = small_run(recipe(tmp_path / "run", sft=sizes, rl=sizes))
    assert same_weights(done.model, small.model)
    for stage in ("sft", "rl"):
        both = [timeless(run.folder.stage(stage).records()) for run in (done, small)]
        assert both[0] == both[1]


def test_a_run_folder_in_use_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder):
        before = sorted(folder.rglob("*"))
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()} on"):
            small_run(recipe(folder))
        assert sorted(folder.rglob("*")) == before
    small_run(recipe(folder, sft=None, eval=None, rl={"steps": 1}))


def test_deterministic_holds_inside_and_is_undone_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that succeeds and in one that fails; without the option nothing is touched."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: list[tuple[bool, str | None, bool]] = []

    def looks(self: LocalLearner, batch: Batch, objective: Objective, **more: bool) -> StepResult:
        seen.append(state())
        if len(seen) == fails_at:
            raise KeyError("stop")
        return step(self, batch, objective, **more)

    def state() -> tuple[bool, str | None, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            torch.backends.cudnn.deterministic,
        )

    monkeypatch.setattr(LocalLearner, "step", looks)
    before, fails_at = state(), 3
    with pytest.raises(KeyError):
        small_run(recipe(tmp_path / "on", task=TASK))
    assert set(seen) == {(True, ":4096:8", True)}
    assert state() == before == (False, None, False)
    seen.clear()
    fails_at = 2
    with pytest.raises(KeyError):
        small_run(recipe(tmp_path / "off", run={"deterministic": False}))
    assert set(seen) == {before}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_models_that_say_nan_of_a_batch(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step on it: the batch is passed over, counted and kept, and all goes on."""
    infer, calls = LocalLearner.infer, []

    def ill(self: LocalLearner, batch: Batch) -> Batch:
        calls.append(1)
        found = infer(self, batch)
        if len(calls) == 2:
            found.old_logprobs[3] = math.nan
        return found

    monkeypatch.setattr(LocalLearner, "infer", ill)
    kl = {"placement": "reward" if algorithm == "ppo" else "loss", "rule": "proportional"}
    rl = {"algorithm": algorithm, "epochs": 2, "minibatches": 2, "kl": {**kl, "target": 0.1}}
    done, _ = small_run(recipe(tmp_path / "run", sft=None, eval=None, rl=rl))
    records = done.folder.stage("rl").records()
    assert [record["train/skipped"] for record in records] == [0, 1, 0]
    assert [record["train/optimiser_steps"] for record in records] == [4, 0, 4]
    assert records[1]["kl/coefficient"] == records[2]["kl/coefficient"]
    assert records[1]["reward/invalid"] == 0
    rewards = [row["reward"] for row in done.samples(step=2, limit=16)]
    assert records[1]["reward/mean"] == pytest.approx(sum(rewards) / 16)
    note = json.loads((done.folder.path / "rl/skipped/step-000002/minibatch-1.json").read_text())
    assert list(note["not_finite"]) == ["old_logprobs"]
    assert [row for row, told in enumerate(note["sequences"]) if told["not_finite"]] == [3]


def test_only_the_first_skipped_batches_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a run that goes on: those of the first half count."""
    monkeypatch.setattr("posttrain.stages.guards.MOST_KEPT", 2)
    place = tmp_path / "skipped"
    keep = _Skipped(place, str)
    batch = Batch.from_rewards([1.0])
    result = StepResult(loss=math.nan, gradient_norm=math.nan, learning_rate=0.0, metrics={})
    for number in (1, 2, 3):
        keep = _Skipped(place, str) if number == 2 else keep
        keep(Skipped(step=number, number=1, batch=batch, result=result))
    assert sorted(path.parent.name for path in place.glob("*/*.json")) == [
        "step-000001",
        "step-000002",
    ]
