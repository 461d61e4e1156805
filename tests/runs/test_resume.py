"""A run that was cut short goes on as if it had not been: every number, every bit."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import GRPO, Killed, cut, given, go, same
from rich.console import Console
from slow_cases import slow_but
from small_runs import timeless

from posttrain.build.model_source import recorded_recipe
from posttrain.build.setup import Supplied
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.folder import RunFolder
from posttrain.stages.run import run

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
    "partial rollouts": {**GRPO, "max_lag": 1, "partial": 2},
    "partial rollouts, run ahead": {**GRPO, "max_lag": 3, "partial": 2},
    "moving baseline": {**GRPO, "algorithm": "reinforce", "advantage": "moving_baseline"},
    "steered penalty": {**GRPO, "algorithm": "ppo_penalty", "epochs": 2},
    "greedy baseline": {**GRPO, "algorithm": "remax"},
    "greedy baseline, run ahead": {**GRPO, "algorithm": "remax", "max_lag": 2},
    "resampled": {**GRPO, "dynamic_sampling": True, "max_resamples": 2},
}


@pytest.mark.parametrize(
    "case", slow_but(CASES, "grpo", "ppo", "run ahead", "partial rollouts", "resampled")
)
def test_a_cut_run_goes_on_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Died while the third checkpoint was written: the second is taken, and the end is the same.

    The reference of PPO was refreshed after step 3, between the two.
    """
    whole, _ = go(given(tmp_path / "whole", CASES[case]))
    values = given(tmp_path / "cut", CASES[case])
    cut(values, save=3)
    every = CASES[case]["save_every"]
    assert checkpoint_steps(RunFolder(tmp_path / "cut").stage("rl")) == [every, 2 * every]
    done, text = go(values, resume=True)
    assert f"rl: goes on from step {2 * every}" in text
    assert not list((tmp_path / "cut").glob("rl.old-*"))
    same(done.folder, whole.folder)


def test_sft_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """8 steps in 4 epochs; died at the checkpoint after the fifth."""
    whole, _ = go(given(tmp_path / "whole", {}, sft={"save_every": 3}))
    values = given(tmp_path / "cut", {}, sft={"save_every": 3})
    cut(values, save=2)
    done, text = go(values, resume=True)
    assert "sft: goes on from step 3" in text
    same(done.folder, whole.folder)


def test_a_reward_model_goes_on(tmp_path: Path) -> None:
    """The stage before it is kept, and its verdict is the same."""
    options = {
        "prefer": {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
        "reward": {"batch_size": 1, "save_every": 2, "epochs": 2, "learning_rate": 1e-3},
        "eval": None,
    }
    stages = {"run": {"seed": 1, "stages": ["sft", "prefer", "reward"]}}
    values = given(tmp_path / "cut", {}, **options)
    values["run"] |= stages["run"]
    cut(values, save=2)
    done, text = go(values, resume=True)
    assert "prefer: already finished" in text
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
    calls = itertools.count(1)  # no value, unlike a number: the reward that counts stays the same

    def spread(completion: str) -> float:
        if next(calls) == 50:
            raise Killed
        return sum(map(ord, completion)) % 11 / 11

    supplied = Supplied(rewards=RewardScorer({spread: 1.0}))
    with pytest.raises(Killed):
        go(values, supplied=supplied)
    assert len(RunFolder(tmp_path / "cut").stage("rl").records()) > 0
    done, text = go(values, supplied=supplied, resume=True)
    assert "rl: starts over" in text
    values["run"]["folder"] = str(tmp_path / "whole")
    whole, _ = go(values, supplied=supplied)
    same(done.folder, whole.folder)
    with pytest.raises(ValueError, match=r"objects \(rewards\) that no folder holds"):
        recorded_recipe(tmp_path / "cut")


def test_another_recipe_is_refused_with_the_difference(
    tmp_path: Path, stopped: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipe and code; what is allowed to change goes on from the checkpoint, not from anew."""
    changed = {"steps": 8, "learning_rate": 5e-3, "temperature": 0.9}  # more steps are the same run
    longer = given(tmp_path / "cut", {**GRPO, **changed})
    with pytest.raises(
        ValueError,
        match=r"(?s)rl\.learning_rate: 0\.01 → 0\.005\n.*rl\.temperature: 1\.0 → 0\.9\nOr put",
    ):
        go(longer, resume=True)
    with pytest.raises(ValueError, match=r"--allow-changes rl\.temperature;"):
        go(longer, resume=True, allow_changes=["rl.learning_rate"])
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.build.fingerprint.code_version", lambda: {"source": "another"})
        with pytest.raises(ValueError, match=r"(?s)changes code;.*code\.source: .* → \"another\""):
            go(stopped, resume=True)
    done, text = go(longer, resume=True, allow_changes=["rl.learning_rate", "rl.temperature"])
    assert "sft: already finished" in text
    assert "rl: goes on from step 4" in text
    assert [record["step"] for record in done.folder.stage("rl").records()] == [*range(9)]


def test_an_edited_data_file_is_refused(tmp_path: Path) -> None:
    """A changed dataset is a change like any other."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+11=", "completion": str(n + 11)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = given(tmp_path / "cut", GRPO, sft={"data": str(data), "wrong_share": 0.0})
    cut(values, save=2)
    data.write_text(data.read_text().replace("3+11=", "5+11="))
    with pytest.raises(ValueError, match=r"(?s)--allow-changes contents;.*contents\.sft\.data: "):
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
    assert "already finished; nothing to do" in text


def test_nothing_draws_from_global_random_numbers(tmp_path: Path) -> None:
    """So there is none to be kept: whatever their state, a run is the same."""
    first, _ = go(given(tmp_path / "first", PPO))
    torch.manual_seed(12345)
    second, _ = go(given(tmp_path / "second", PPO))
    same(first.folder, second.folder)
