"""Functions that are called after every step: own numbers, an early end, what they raise."""

from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Killed
from small_runs import RECIPE, RL, TASK, TINY, same_weights, timeless

import posttrain
from posttrain.pipelines.callbacks import Callbacks
from posttrain.stages import rl_learning

JOB = {**RL, "task": TASK, "grading": {"workers": 0}, "evaluate": False, "steps": 4}
SFT = {**RECIPE["sft"], "task": TASK, "model_options": {"options": TINY}}


def counted(done: posttrain.StepDone) -> dict[str, float]:
    """Own numbers: of what is there, of what was sampled, of an evaluation of one's own."""
    answers = done.generate(["1+1=", "2+2="], max_new_tokens=4)
    assert [answer.prompt.text for answer in answers] == ["1+1=", "2+2="]
    return {
        "own/before": float(len(done.history)),
        "own/rollouts": float(len(done.rollouts)),
        "own/characters": float(sum(len(answer.text) for answer in answers)),
    }


def patient(done: posttrain.StepDone) -> posttrain.Stop | None:
    """Ends where a number of the records says so, and where nothing else is remembered."""
    if len(done.history) + 1 < 2:
        return None
    return posttrain.Stop("seen enough", {"own/last": done.history[-1]["own/before"]})


def test_own_numbers_and_an_early_end(tmp_path: Path) -> None:
    """They are in the record; the stage is finished and says why; nothing else differs."""
    plain = posttrain.rl(folder=tmp_path / "plain", **{**JOB, "steps": 2})
    run = posttrain.rl(folder=tmp_path / "run", callbacks=[counted, patient], **JOB)
    records = run.folder.stage("rl").records()
    assert [row["own/before"] for row in records] == [0.0, 1.0]
    assert [row["own/rollouts"] for row in records] == [16.0, 16.0]
    assert records[1]["own/last"] == 0.0
    assert run.summary["stopped"] == {"rl": {"step": 2, "reason": "seen enough"}}
    assert same_weights(run.model, plain.model)
    own = [{k: v for k, v in row.items() if not k.startswith("own/")} for row in timeless(records)]
    assert own == timeless(plain.folder.stage("rl").records())
    with pytest.raises(ValueError, match=r"a callback has ended rl after step 2 \(seen enough\)"):
        posttrain.rl(
            folder=tmp_path / "run",
            callbacks=[counted, patient],
            resume=True,
            **{**JOB, "steps": 9},
        )


def test_an_end_that_was_decided_stays_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last step and the mark of the end: the resumed stage takes no other."""
    given = {"folder": tmp_path / "run", "callbacks": [counted, patient], **JOB}

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rl_learning, "phase", dies)  # before the model is saved
        with pytest.raises(Killed):
            posttrain.rl(**given)
    run = posttrain.rl(resume=True, **given)
    assert [row["step"] for row in run.folder.stage("rl").records()] == [1, 2]
    assert run.summary["stopped"]["rl"]["reason"] == "seen enough"


def test_what_raises_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The step is saved whatever the settings are; mended and resumed, the run is the whole one."""
    whole = posttrain.rl(folder=tmp_path / "whole", callbacks=[len_of_history], **JOB)

    def broken(done: posttrain.StepDone) -> dict[str, float]:
        return {"own/number": 1 / (2 - done.step)}

    broken.__qualname__ = "len_of_history"  # so that the same callbacks are there, mended
    given = {"folder": tmp_path / "run", "run_options": {"save_minutes": 0.0}, **JOB}
    told = r"len_of_history raised ZeroDivisionError: .*, after step 2 of rl, which is saved"
    with pytest.raises(RuntimeError, match=told):
        posttrain.rl(callbacks=[broken], **given)
    run = posttrain.rl(callbacks=[len_of_history], resume=True, **given)
    assert [row.get("own/number") for row in run.folder.stage("rl").records()] == [1.0, None, 2, 3]
    assert same_weights(run.model, whole.model)


def len_of_history(done: posttrain.StepDone) -> dict[str, float]:
    return {"own/number": float(len(done.history))}


def test_in_sft(tmp_path: Path) -> None:
    """There too: numbers, answers of the policy as it is, an early end."""

    def early(done: posttrain.StepDone) -> posttrain.Stop | None:
        return posttrain.Stop("enough") if done.step == 3 else None

    run = posttrain.sft(folder=tmp_path / "run", callbacks=[counted, early], **SFT)
    rows = [row for row in run.folder.stage("sft").records() if row["step"] > 0]
    assert [row["own/before"] for row in rows] == [0.0, 1.0, 2.0]
    assert run.summary["stopped"] == {"sft": {"step": 3, "reason": "enough"}}


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (3, "it returned 3; expected a mapping"),
        ({"reward/mean": 1.0}, "'reward/mean', which is already in the record"),
        ({"own": "many"}, "could not convert string"),
    ],
)
def test_what_is_returned_is_checked(returned: Any, told: str) -> None:
    callbacks = Callbacks([lambda done: returned], stage="rl", total_steps=3)
    assert callbacks.called(1, {"reward/mean": 0.5}) == {}
    with pytest.raises(RuntimeError, match=told):
        callbacks.check()


def test_what_is_no_list_of_functions_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="callbacks: expected a list of functions"):
        posttrain.rl(folder=tmp_path / "run", callbacks=["early"], **JOB)
    several = {**JOB, "model_options": {"options": {**TINY, "seed": 0}}}
    several |= {"adapters": 2, "adapter": {"rank": 2}}
    with pytest.raises(ValueError, match="callbacks: do not work with several"):
        posttrain.rl(folder=tmp_path / "run", callbacks=[counted], **several)
