"""``posttrain check`` and preferences: files of ``[reward]``, and a reward model still to come."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from small_runs import TASK, TINY, small_run

from posttrain.check import Line, Report, check_recipe

WATCHED = {"model": 1.0, "exact": 0.0}


def write(path: Path, prompts: Iterable[str]) -> str:
    rows = [{"prompt": prompt, "chosen": "1", "rejected": "no"} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(*numbers: int) -> list[str]:
    return [f"{n}+1=" for n in numbers]


def given(folder: Path, **reward: Any) -> dict[str, Any]:
    """A recipe of sft and reward; the model is never trained where the reward's data is wrong."""
    return {
        "run": {"folder": str(folder / "run"), "seed": 1, "threads": 1},
        "model": {"name": "tiny", "options": TINY},
        "task": TASK,
        "sft": {"epochs": 1},
        "reward": {"batch_size": 4, **reward},
    }


def preferences(report: Report) -> list[Line]:
    return [line for line in report.lines if line.name == "preferences"]


def test_preferences_are_counted(tmp_path: Path) -> None:
    """Those to learn from, those held out, and the longest, end token and all."""
    data = write(tmp_path / "a.jsonl", sums(*range(10, 20)))
    test = write(tmp_path / "b.jsonl", sums(1, 2, 300))
    (line,) = preferences(check_recipe(given(tmp_path, data=data, test_data=test)))
    text = "10 to learn from, 3 held out, the longest has 9 tokens"
    assert (line.area, line.state, line.text) == ("data", "pass", text)
    (line,) = preferences(check_recipe(given(tmp_path, data=data, test_share=0.2)))
    assert line.text.startswith("8 to learn from, 2 held out")


def test_preferences_of_the_run_itself_have_no_line(tmp_path: Path) -> None:
    recipe = given(tmp_path)
    recipe["prefer"] = {"max_new_tokens": 4}
    report = check_recipe(recipe)
    assert report.ok
    assert not preferences(report)


@pytest.mark.filterwarnings("ignore:.*repeat an earlier one")
def test_the_check_before_rl_does_not_read_them_again(tmp_path: Path) -> None:
    """The stage has just done so, and has said what there was to say."""
    recipe = ppo(tmp_path, WATCHED, steps=1, prompts_per_step=2, check="warn")
    recipe["reward"]["data"] = write(tmp_path / "twice.jsonl", sums(1, 1, 2, 3))
    assert [line.state for line in preferences(check_recipe(recipe))] == ["pass", "warn"]
    assert "preferences" not in small_run(recipe)[1].partition("check: ")[2]


TOO_LONG = [prompt * 40 for prompt in sums(1, 2, 3)]


def test_preferences_that_do_not_fit_are_warned_of(tmp_path: Path) -> None:
    """In either file; the longest is then the longest of those that fit."""
    data = write(tmp_path / "a.jsonl", [*sums(*range(9)), *TOO_LONG])
    test = write(tmp_path / "b.jsonl", [*sums(11, 12), "3+3=" * 40])
    report = check_recipe(given(tmp_path, data=data, test_data=test))
    passed, *warned = preferences(report)
    assert passed.text == "9 to learn from, 2 held out, the longest has 8 tokens"
    left_out = "are longer than the model's context of 64 tokens and are left out"
    assert [line.text for line in warned] == [
        f"3 of 12 sets {left_out}",
        f"1 of 3 held-out sets {left_out}",
    ]
    assert {line.state for line in warned} == {"warn"}


def broken(folder: Path, fault: str) -> dict[str, Any]:
    """The section ``[reward]`` with one fault."""
    data = write(folder / "a.jsonl", sums(*range(9)))
    test = write(folder / "b.jsonl", sums(11, 12))
    if fault == "the same file":
        test = data
    elif fault == "shared":
        write(folder / "b.jsonl", ["11+1=", " 3+1= "])
    elif fault == "torn":
        Path(data).write_text(Path(data).read_text() + '{"prompt": "1')
    elif fault == "torn test":
        Path(test).write_text('{"prompt": "1')
    elif fault == "empty":
        Path(data).write_text("")
    elif fault == "long":
        write(folder / "a.jsonl", TOO_LONG)
    elif fault == "long test":
        write(folder / "b.jsonl", TOO_LONG)
    return {"data": data, "test_data": test}


SHARED = "also train prompts, the first is"
TEXTS = {
    "the same file": f"reward.test_data: 9 of 9 test prompts are {SHARED} '0+1='",
    "shared": f"reward.test_data: 1 of 2 test prompts are {SHARED} ' 3+1= '",
    "torn": "a.jsonl:10: not valid JSON",
    "torn test": "b.jsonl:1: not valid JSON",
    "empty": "a.jsonl: holds no rows",
    "long": "reward.data: none of the 3 sets fits the model's context of 64 tokens",
    "long test": "reward.test_data: none of the 3 held-out sets fits",
}


@pytest.mark.parametrize("fault", TEXTS)
def test_faults_are_found_by_a_check(tmp_path: Path, fault: str) -> None:
    report = check_recipe(given(tmp_path, **broken(tmp_path, fault)))
    (line,) = preferences(report)
    assert (line.area, line.state) == ("data", "fail")
    assert TEXTS[fault] in line.text
    assert line.fix
    assert report.of("fail") == [line]


@pytest.mark.parametrize("fault", ["the same file", "shared"])
def test_a_run_that_would_test_its_memory_is_refused(tmp_path: Path, fault: str) -> None:
    """Before anything is trained: the stage sft, which would come first, has not begun."""
    with pytest.raises(ValueError, match="or the test measures memory") as error:
        small_run(given(tmp_path, **broken(tmp_path, fault)))
    assert TEXTS[fault] in str(error.value)
    assert not (tmp_path / "run" / "sft").exists()


@pytest.mark.parametrize(
    ("rewards", "names"),
    [
        (WATCHED, {"groups with signal"}),
        ({"model": 1.0}, {"groups with signal"}),
        (
            {"model": 1.0, "numeric": {"weight": 0.1, "extract": "tag"}},
            {"gold answers", "tells answers apart", "groups with signal"},
        ),
    ],
    ids=["watched", "alone", "beside another"],
)
def test_what_a_stand_in_says_is_a_warning(
    tmp_path: Path, rewards: dict[str, Any], names: set[str]
) -> None:
    """The model never gets a sum right, which says nothing of the reward model to come."""
    report = check_recipe(ppo(tmp_path, rewards), fast=True)
    assert report.ok, report.of("fail")
    excused = {line.name for line in report.of("warn") if "may judge differently" in line.fix}
    assert excused == names


def test_what_does_not_rest_on_a_stand_in_still_fails(tmp_path: Path) -> None:
    """A learning rate that is absurd, and rewards that have no model among them."""
    cut = check_recipe(ppo(tmp_path, WATCHED, learning_rate=10.0), fast=True)
    assert "one step" in {line.name for line in cut.of("fail")}
    lost = {"numeric": {"extract": "tag"}}
    plain = check_recipe(ppo(tmp_path, lost), fast=True)
    names = {"gold answers", "tells answers apart", "groups with signal"}
    assert {line.name for line in plain.of("fail")} == names


def ppo(folder: Path, rewards: dict[str, Any], **rl: Any) -> dict[str, Any]:
    """PPO on the reward model of its own run, without sft before it."""
    recipe = given(folder, data=write(folder / "a.jsonl", sums(*range(20))))
    del recipe["sft"]
    recipe["task"] = {**TASK, "digits": 3}  # no number that is written by chance is right
    section = {"algorithm": "ppo", "max_new_tokens": 4, **rl}
    return {**recipe, "rewards": rewards, "rl": section}
