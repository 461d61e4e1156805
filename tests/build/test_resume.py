"""A run that was cut short goes on as if it had not been: every number, every bit."""

import errno
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import recipe, same_weights, timeless

from posttrain.build import keeper
from posttrain.build.interrupts import Stopped
from posttrain.build.results import Run
from posttrain.build.resume import recorded_recipe
from posttrain.build.run import Supplied, run
from posttrain.config import recipe_from_dict
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import checkpoints, read_rollouts
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.folder import RunFolder

GRPO = {"steps": 6, "save_every": 2, "evaluate_every": 2, "evaluate_problems": 5}
PPO = {
    **GRPO,
    "algorithm": "ppo",
    "epochs": 2,
    "critic": {"warmup_steps": 1},
    "kl": {"rule": "proportional", "target": 0.05, "horizon": 20, "refresh_every": 3},
}
CASES: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "ppo": PPO,
    "shared critic": {**PPO, "critic": {"kind": "shared"}},
    "run ahead": {**GRPO, "max_lag": 2},
    "run ahead, not evaluated": {"steps": 6, "save_every": 1, "max_lag": 1},
    "moving baseline": {**GRPO, "algorithm": "reinforce", "advantage": "moving_baseline"},
    "steered penalty": {**GRPO, "algorithm": "ppo_penalty", "epochs": 2},
    "resampled": {**GRPO, "dynamic_sampling": True, "max_resamples": 2},
}


class Killed(BaseException):
    """Ends a run where it stands, as no handler would."""


def given(folder: Path, rl: dict[str, Any], **sections: Any) -> dict[str, Any]:
    changes = {"learning_rate": 1e-2, **rl}
    return recipe(folder, rl=changes, grading={"workers": 0}, **sections)


def go(values: dict[str, Any], **options: Any) -> tuple[Run, str]:
    console = Console(file=io.StringIO(), width=200)
    done = run(recipe_from_dict(values), console=console, **options)
    return done, console.file.getvalue()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of GRPO, whole."""
    return go(given(tmp_path_factory.mktemp("grpo") / "whole", GRPO))[0].folder


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Let the run die in a function of the keeper, at its n-th call."""
    with monkeypatch.context() as patch:

        def die(name: str, call: int) -> None:
            whole, calls = getattr(keeper, name), 0

            def dies(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == call:
                    raise Killed
                return whole(*arguments, **options)

            patch.setattr(keeper, name, dies)

        die.undo = patch.undo  # type: ignore[attr-defined]
        yield die


def same(first: RunFolder, second: RunFolder, *, stages: tuple[str, ...] = ("sft", "rl")) -> None:
    """Metrics but for clocks, rollouts, findings and weights."""
    for stage in stages:
        one, other = first.stage(stage), second.stage(stage)
        assert timeless(one.records()) == timeless(other.records())
        assert one.findings() == other.findings()
        assert same_weights(one.model, other.model)
    if "rl" in stages:
        rows = [read_rollouts(folder.stage("rl").rollouts) for folder in (first, second)]
        assert rows[0] == rows[1]
    summaries = [dict(folder.summary or {}) for folder in (first, second)]
    for summary in summaries:
        del summary["seconds"], summary["model"]
    assert summaries[0] == summaries[1]
    assert first.samples == second.samples


@pytest.mark.parametrize("case", CASES)
def test_a_cut_run_goes_on_bit_for_bit(case: str, tmp_path: Path, dying: Any) -> None:
    """Died while the second checkpoint was written: the first is taken, and the end is the same."""
    whole, _ = go(given(tmp_path / "whole", CASES[case]))
    values = given(tmp_path / "cut", CASES[case])
    dying("save_learner", 2)
    with pytest.raises(Killed):
        go(values)
    dying.undo()
    first = CASES[case]["save_every"]
    assert checkpoint_steps(RunFolder(tmp_path / "cut").stage("rl")) == [first]
    done, text = go(values, resume=True)
    assert f"rl: goes on from step {first}" in text
    assert not list((tmp_path / "cut").glob("rl.old-*"))
    same(done.folder, whole.folder)


def test_sft_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, dying: Any) -> None:
    """8 steps in 4 epochs; died at the checkpoint after the fifth."""
    whole, _ = go(given(tmp_path / "whole", {}, sft={"save_every": 3}))
    values = given(tmp_path / "cut", {}, sft={"save_every": 3})
    dying("save_learner", 2)
    with pytest.raises(Killed):
        go(values)
    dying.undo()
    done, text = go(values, resume=True)
    assert "sft: goes on from step 3" in text
    same(done.folder, whole.folder)


def test_a_reward_model_goes_on(tmp_path: Path, dying: Any) -> None:
    """The stage before it is kept, and its verdict is the same."""
    options = {
        "prefer": {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
        "reward": {"batch_size": 1, "save_every": 2, "epochs": 2, "learning_rate": 1e-3},
        "eval": None,
    }
    stages = {"run": {"seed": 1, "stages": ["sft", "prefer", "reward"]}}
    values = given(tmp_path / "cut", {}, **options)
    values["run"] |= stages["run"]
    dying("save_learner", 2)
    with pytest.raises(Killed):
        go(values)
    dying.undo()
    done, text = go(values, resume=True)
    assert "prefer: finished already" in text
    assert "reward: goes on from step 2" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values)
    first, second = (folder.folder.stage("reward") for folder in (done, whole))
    assert timeless(first.records()) == timeless(second.records())
    assert (first.path / "verdict.json").read_text() == (second.path / "verdict.json").read_text()
    weights = [(stage.model / "model.safetensors").read_bytes() for stage in (first, second)]
    assert weights[0] == weights[1]


def test_without_a_checkpoint_the_stage_starts_over_in_place(tmp_path: Path) -> None:
    """save_every = 0: nothing is moved aside, and the end is the same."""
    values = given(tmp_path / "cut", {"evaluate_every": 1, "evaluate_problems": 5}, rewards=None)
    calls = 0

    def spread(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise Killed
        return sum(map(ord, completion)) % 11 / 11

    supplied = Supplied(rewards=RewardScorer({spread: 1.0}))
    with pytest.raises(Killed):
        go(values, supplied=supplied)
    assert len(RunFolder(tmp_path / "cut").stage("rl").records()) > 0
    done, text = go(values, supplied=supplied, resume=True)
    assert "rl: goes on from its beginning" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, supplied=supplied)
    same(done.folder, whole.folder)
    with pytest.raises(ValueError, match=r"objects of its own \(rewards\)"):
        recorded_recipe(tmp_path / "cut")


@pytest.fixture
def stopped(tmp_path: Path, dying: Any) -> dict[str, Any]:
    """The values of a run that died at its third checkpoint, after step 6."""
    values = given(tmp_path / "cut", GRPO)
    dying("save_learner", 3)
    with pytest.raises(Killed):
        go(values)
    dying.undo()
    return values


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


def test_another_recipe_is_refused_with_the_difference(
    tmp_path: Path, stopped: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipe and code; what is allowed to change goes on from the checkpoint, not from anew."""
    longer = given(tmp_path / "cut", {**GRPO, "steps": 8, "learning_rate": 5e-3})
    with pytest.raises(
        ValueError, match=r"(?s)rl\.learning_rate: 0\.01 → 0\.005\n.*rl\.steps: 6 → 8"
    ):
        go(longer, resume=True)
    with pytest.raises(ValueError, match=r"--allow-changes rl\.steps;"):
        go(longer, resume=True, allow_changes=["rl.learning_rate"])
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.build.run.code_version", lambda: {"source": "another"})
        with pytest.raises(ValueError, match=r"(?s)code\.source: .* → \"another\".*changes code;"):
            go(stopped, resume=True)
    done, text = go(longer, resume=True, allow_changes=["rl.learning_rate", "rl.steps"])
    assert "sft: finished already" in text
    assert "rl: goes on from step 4" in text
    assert [record["step"] for record in done.folder.stage("rl").records()] == [*range(9)]


def test_an_edited_data_file_is_refused(tmp_path: Path, dying: Any) -> None:
    """A changed dataset is a change like any other."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = given(tmp_path / "cut", GRPO, sft={"data": str(data), "wrong_share": 0.0})
    dying("save_learner", 2)
    with pytest.raises(Killed):
        go(values)
    dying.undo()
    data.write_text(data.read_text().replace("3+1=", "5+1="))
    with pytest.raises(ValueError, match=r"(?s)contents\.sft\.data: .*--allow-changes contents;"):
        go(values, resume=True)


def test_the_folder_holds_all_it_takes_and_may_be_moved(
    tmp_path: Path, stopped: dict[str, Any], uninterrupted: RunFolder
) -> None:
    """As ``posttrain resume`` does: by config.json alone."""
    (tmp_path / "cut").rename(tmp_path / "moved")
    console = Console(file=io.StringIO(), width=200)
    done = run(recorded_recipe(tmp_path / "moved"), console=console, resume=True)
    assert "rl: goes on from step 4" in console.file.getvalue()
    same(done.folder, uninterrupted)


def test_a_run_that_is_finished_or_not_begun(tmp_path: Path) -> None:
    """--resume starts what is not there, and leaves alone what is done."""
    values = given(tmp_path / "run", {"steps": 1}, eval=None)
    done, _ = go(values, resume=True)
    assert done.summary["stages"] == ["sft", "rl"]
    _, text = go(values, resume=True)
    assert "finished already; nothing to do" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked to stop in step 2: it is finished, saved although none was due, and said."""
    values = given(tmp_path / "cut", {"steps": 4}, eval=None, rewards=None)
    calls = 0

    def spread(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            signal.raise_signal(number)
        return sum(map(ord, completion)) % 11 / 11

    supplied = Supplied(rewards=RewardScorer({spread: 1.0}))
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(Stopped) as stop:
        run(recipe_from_dict(values), supplied, console=console)
    assert (stop.value.number, stop.value.saved) == (number, 2)
    assert "finishing this step" in capfd.readouterr().err
    assert "stopped after step 2, which is saved; to go on: call" in console.file.getvalue()
    done, text = go(values, supplied=supplied, resume=True)
    assert "rl: goes on from step 2" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, supplied=supplied)
    same(done.folder, whole.folder)


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
    whole_save = keeper.save_learner

    def failing(learner: Any, folder: Path) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        numbers = whole_save(learner, folder)
        if calls == 2:
            raise OSError(code, "No room", str(folder / "optimizer.safetensors"))
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "save_learner", failing)
        with pytest.raises(OSError, match=r"No room\. What was written before is whole; .* resume"):
            go(values)
    rl = RunFolder(tmp_path / "cut").stage("rl")
    assert [path.name for path in rl.checkpoints.iterdir()] == ["step-000002"]
    done, _ = go(values, resume=True)
    same(done.folder, uninterrupted)


def test_nothing_draws_from_global_random_numbers(tmp_path: Path) -> None:
    """So there is none to be kept: whatever their state, a run is the same."""
    first, _ = go(given(tmp_path / "first", PPO))
    torch.manual_seed(12345)
    second, _ = go(given(tmp_path / "second", PPO))
    same(first.folder, second.folder)
