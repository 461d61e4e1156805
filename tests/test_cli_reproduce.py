"""``posttrain reproduce``: a stand-in result is run again, and judged by its interval."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command_in
from small_runs import RECIPE, recipe

from posttrain.cli import reproduce
from posttrain.config import recipe_from_dict, resolve, to_dict
from posttrain.models.tiny import build_tiny

SEED = {"before": 0.0, "after": 0.2, "minutes": 0.5}


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path / "results")
    return command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)


def publish(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A result of the small recipe, whose seeds 0 and 2 were published."""
    config = to_dict(resolve(recipe_from_dict(recipe(Path("unused"), **changes.pop("recipe", {})))))
    found = {
        "name": name,
        "recipe": "small.toml",
        "about": ["A small one.", "", "Before    posttrain model import FILE models/small"],
        "model": config["model"]["name"],
        "task": "arithmetic",
        "hardware": "one abacus",
        "problems": 10,
        "mean": 0.2,
        "interval": [0.0, 1.0],
        "config": json.loads(json.dumps(config)),
        "seeds": [{"seed": 0, **SEED}, {"seed": 2, **SEED}],
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found))
    return found


def test_a_run_inside_and_outside_of_the_interval(command: Command, tmp_path: Path) -> None:
    publish(tmp_path / "results", "small")
    done = command("reproduce", "small")
    assert done.code == 0, done.err
    folder = tmp_path / "runs" / "reproduce-small-1"  # the first seed that was not published
    config = json.loads((folder / "config.json").read_text())
    assert (config["run"]["seed"], config["rl"]["steps"]) == (1, RECIPE["rl"]["steps"])
    right = json.loads((folder / "summary.json").read_text())["accuracy_after"]
    told = " ".join(done.out.split())
    assert f"small, seed 1: {100 * right:.1f}% of 10 problems right (greedy)" in told
    assert "published: 20.0% of 10, mean of the seeds 0, 2 (20.0, 20.0), 0.5 minutes each" in told
    assert told.endswith("inside of the published interval for one run, 0.0 to 100.0%")

    publish(tmp_path, "mine", interval=[right + 0.05, right + 0.1])  # a file of one's own
    judged = command("reproduce", "mine.json", "--out", folder)
    assert judged.code == 1
    assert "outside, below, of the published interval" in judged.out
    publish(tmp_path, "mine", interval=[right - 0.1, right - 0.05])
    assert "outside, above, of" in command("reproduce", "mine.json", "--out", folder).out


SUMMARY = {
    "seed": 1,
    "problems": 1000,
    "accuracy_before": 0.25,
    "accuracy_after": 0.5,
    "invalid_after": 0.0,
    "seconds": 60.0,
    "hardware": "one abacus",
}


def judge(*, before: tuple[float | None, ...], **changes: Any) -> tuple[str, bool]:
    """The verdict on a run of a result whose seeds began at these accuracies."""
    seeds = [{**SEED, "seed": n, "before": value} for n, value in enumerate(before)]
    found = {"name": "small", "problems": 1000, "mean": 0.5, "interval": [0.4, 0.6]}
    found |= {"hardware": "one abacus", "seeds": seeds}
    return reproduce.verdict(found, {**SUMMARY, **changes})


def test_a_run_that_counts_something_else_is_refused() -> None:
    assert judge(before=(0.25, 0.25))[1]
    for problems in (999, None):
        with pytest.raises(ValueError, match=f"on {problems} problems, and published are 1000"):
            judge(before=(0.25, 0.25), problems=problems)
    with pytest.raises(ValueError, match=r"not every answer could be graded.*: the judge is away"):
        judge(before=(0.25, 0.25), invalid_after=0.001, invalid_reason="the judge is away")
    with pytest.raises(ValueError, match="not every answer could be graded"):
        judge(before=(0.25, 0.25), invalid_after=None)


def test_a_run_from_another_start_is_not_the_published_one() -> None:
    """0.25 of 1,000: 3.291 · √(0.25 · 0.75/1000) = 0.045; seeds that differ widen it."""
    text, same = judge(before=(0.25, 0.25), accuracy_before=0.2)
    assert not same
    assert "inside of the published interval" in text
    assert text.endswith(
        "but other weights or data: before RL 20.0% were right, published 25.0%, and the same "
        "start gives 20.5 to 29.5%"
    )
    assert judge(before=(0.25, 0.25), accuracy_before=0.206)[1]
    assert judge(before=(0.25, 0.25), accuracy_before=0.294)[1]
    assert not judge(before=(0.25, 0.25), accuracy_before=0.296)[1]
    assert judge(before=(0.2, 0.3), accuracy_before=0.34)[1]
    assert judge(before=(0.25, None), accuracy_before=None)[1]
    assert judge(before=(None, None), accuracy_before=0.9)[1]


def test_without_a_name_they_are_listed(command: Command, tmp_path: Path) -> None:
    publish(tmp_path / "results", "small", interval=[0.1, 0.345])
    line = next(line for line in command("reproduce").out.splitlines() if "small" in line)
    for shown in ("20.0%", "10.0 to 34.5%", "0.5", "one abacus"):
        assert shown in line, shown


def test_a_missing_model_is_said_with_how_to_get_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    named = {"model": {"name": "models/small", "options": {}}, "sft": None}
    given = {**named, "run": {"stages": ["eval"]}}
    publish(tmp_path / "results", "small", recipe=given)
    missing = command("reproduce", "small")
    assert missing.code == 2
    assert "models/small" in missing.err
    assert "Before    posttrain model import FILE models/small" in missing.err
    # Once it is there, under whatever name, the same command goes on.
    model, tokenizer = build_tiny(hidden_size=32, num_layers=2, max_positions=64)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    found = command("reproduce", "small", "--model", "other")
    assert found.code == 0, found.err


def test_an_unknown_name_is_told_with_those_there_are(command: Command, tmp_path: Path) -> None:
    publish(tmp_path / "results", "small")
    unknown = command("reproduce", "smal")
    assert unknown.code == 2
    assert "'smal': no such result; there are: small" in unknown.err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"interval": null}'])
def test_what_is_no_result_is_refused(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    refused = command("reproduce", "broken.json")
    assert refused.code == 2
    assert "not a result of two seeds or more" in refused.err
