"""A finished run is given more steps: what comes out is what the longer run would have given."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ledger_account import read_ledger
from resumed_runs import Killed, go, same
from small_runs import recipe, same_weights, timeless

from posttrain.runs import RunFolder
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.stages import rl_watch

WARM = {"learning_rate": 1e-2, "evaluate_every": 2, "evaluate_problems": 5}


def values(folder: Path, steps: int, **rl: Any) -> dict[str, Any]:
    return recipe(folder, sft=None, rl={**WARM, "steps": steps, **rl}, grading={"workers": 0})


def test_a_prolonged_run_is_the_longer_one(tmp_path: Path) -> None:
    """Metrics, rollouts, findings, weights and evaluation, bit for bit; also after a kill."""
    whole, _ = go(values(tmp_path / "whole", 6))
    short, _ = go(values(tmp_path / "run", 2))
    assert checkpoint_steps(short.folder.stage("rl")) == [2]
    before = short.summary["accuracy_before"]

    real = rl_watch.Watch.on_step

    def dies(watch: Any, taken: Any) -> None:
        real(watch, taken)
        if taken.state.step == 4:
            raise Killed

    longer = values(tmp_path / "run", 6, save_every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_watch.Watch, "on_step", dies)
        with pytest.raises(Killed):
            go(longer, resume=True, allow_changes=["rl.save_every"])
    done, text = go(longer, resume=True)
    assert "rl: goes on from step 4" in text
    same(whole.folder, done.folder, stages=("rl",))
    assert done.summary["accuracy_before"] == before
    assert done.folder.stage_record("eval")["after"] == whole.folder.stage_record("eval")["after"]


def test_prolonging_at_once_and_twice(tmp_path: Path) -> None:
    """Without a kill too; and what is long enough has nothing to do."""
    whole, _ = go(values(tmp_path / "whole", 4))
    for steps in (1, 2, 4):
        done, text = go(values(tmp_path / "run", steps), resume=True)
    assert "rl.steps: 2 → 4" in text
    assert "rl: goes on from step 2" in text
    records = [folder.stage("rl").records() for folder in (whole.folder, done.folder)]
    # Where a run ends it is evaluated once more than the longer one was there.
    plain = [
        {k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(records[1])
    ]
    assert plain == [
        {k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(records[0])
    ]
    assert same_weights(whole.model, done.model)
    _, text = go(values(tmp_path / "run", 4), resume=True)
    assert "finished already; nothing to do" in text


def test_what_was_not_sampled_ahead_is_said(tmp_path: Path) -> None:
    """With a lag the longer run is another one; each group is still trained exactly once."""
    go(values(tmp_path / "run", 2, max_lag=1))
    done, text = go(values(tmp_path / "run", 4, max_lag=1), resume=True)
    assert "sampled ahead by now comes from newer weights" in text
    account = read_ledger(done.folder.stage("rl").path)
    assert account.problems == ()
    assert [int(row["step"]) for row in done.folder.stage("rl").records()][-4:] == [1, 2, 3, 4]


def test_a_schedule_over_all_steps_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    go(values(tmp_path / "run", 2, schedule="cosine"))
    longer = values(tmp_path / "run", 3, schedule="cosine")
    with pytest.raises(ValueError, match=r"rl\.steps: 2 → 3\nrl\.schedule = cosine spreads"):
        go(longer, resume=True)
    done, _ = go(longer, resume=True, allow_changes=["rl.steps"])
    assert [int(row["step"]) for row in done.folder.stage("rl").records()][-1] == 3


def test_what_cannot_be_prolonged_is_left_as_it_is(tmp_path: Path) -> None:
    """Without a checkpoint; and for another change beside the steps."""
    short, _ = go(values(tmp_path / "run", 1))
    changed = values(tmp_path / "run", 2, temperature=0.5)
    with pytest.raises(ValueError, match=r"has changed:\n  rl\.temperature: 1.0 → 0.5\n"):
        go(changed, resume=True)
    for file in short.folder.stage("rl").checkpoints.glob("*/manifest.json"):
        os.remove(file)
    with pytest.raises(ValueError, match="cannot be prolonged, because rl has left no checkpoint"):
        go(values(tmp_path / "run", 2), resume=True)
    _, text = go(values(tmp_path / "run", 1), resume=True)
    assert "finished already; nothing to do" in text


def test_epochs_of_sft_are_prolonged(tmp_path: Path) -> None:
    def of(name: str, epochs: int) -> dict[str, Any]:
        section = {"epochs": epochs, "schedule": "constant", "evaluate_every": 2}
        return recipe(tmp_path / name, rl=None, eval=None, sft=section, rewards=None)

    whole, _ = go(of("whole", 4))
    go(of("run", 2))
    done, _ = go(of("run", 4), resume=True)
    records = [folder.stage("sft").records() for folder in (whole.folder, done.folder)]
    assert timeless(records[0]) == timeless(records[1])
    assert same_weights(whole.model, done.model)


def test_what_has_run_out_of_patience_is_not_prolonged(tmp_path: Path) -> None:
    def of(epochs: int) -> dict[str, Any]:
        still = {"learning_rate": 1e-30, "evaluate_every": 1, "patience": 1}
        section = {"epochs": epochs, "schedule": "constant", **still}
        return recipe(tmp_path / "run", rl=None, eval=None, sft=section, rewards=None)

    go(of(2))
    with pytest.raises(ValueError, match="has run out of patience after step 1"):
        go(of(4), resume=True)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("by", ["epochs", "steps"])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_evaluations_of_a_prolonged_stage_come_as_they_did(
    tmp_path: Path, stage: str, by: str
) -> None:
    """Left to itself, their interval is that of the first start: about ten in the shorter run."""

    def of(name: str, number: int, **more: Any) -> dict[str, Any]:
        section = {by: number, "schedule": "constant", "batch_size": 4, **more}
        made = recipe(tmp_path / name, sft=None, rl=None, eval=None, rewards=None)
        if stage == "dpo":
            section |= {"data": str(pairs), "learning_rate": 1e-3}
            del made["task"]
        return {**made, stage: section}

    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "?"} for n in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short, long = (2, 5) if by == "epochs" else (20, 50)
    first, _ = go(of("run", short))
    every = int(looked(first.folder, stage)[1])
    whole, _ = go(of("whole", long, evaluate_every=every))
    done, text = go(of("run", long), resume=True)
    assert f"{stage}.{by}: {short} → {long}" in text
    assert looked(done.folder, stage) == looked(whole.folder, stage)
    records = [folder.stage(stage).records() for folder in (whole.folder, done.folder)]
    assert timeless(records[0]) == timeless(records[1])
    assert same_weights(whole.model, done.model)
    alone, _ = go(of("alone", long))
    assert looked(alone.folder, stage)[1] > every  # so it was not by chance


def looked(folder: RunFolder, stage: str) -> list[float]:
    """The steps at which the held-out loss was looked at."""
    return [row["step"] for row in folder.stage(stage).records() if "test/loss" in row]


def test_steps_in_place_of_epochs_are_no_prolonging(tmp_path: Path) -> None:
    """How many the epochs came to is not in the recipe: it is a change like others."""

    def of(**section: Any) -> dict[str, Any]:
        made = recipe(tmp_path / "run", rl=None, eval=None, sft=None, rewards=None)
        return {**made, "sft": {"schedule": "constant", **section}}

    go(of(steps=4))
    with pytest.raises(ValueError, match=r"another recipe \(sft\.steps: 4 → 3\); choose another"):
        go(of(steps=3), resume=True)
    with pytest.raises(ValueError, match=r"another recipe \(.*sft\.steps: 4 → unset"):
        go(of(epochs=9), resume=True)
    done, text = go(of(steps=6), resume=True)
    assert "sft: goes on from step 4" in text
    assert [int(row["step"]) for row in done.folder.stage("sft").records()][-1] == 6
