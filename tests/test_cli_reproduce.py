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
    assert f"small, seed 1: {100 * right:.1f} % of 10 problems right (greedy)" in told
    assert "published: 20.0 % of 10, mean of the seeds 0, 2 (20.0, 20.0), 0.5 minutes each" in told
    assert told.endswith("inside of the published interval for one run, 0.0 to 100.0 %")

    publish(tmp_path, "mine", interval=[right + 0.05, right + 0.1])  # a file of one's own
    judged = command("reproduce", "mine.json", "--out", folder)
    assert judged.code == 1
    assert "outside, below, of the published interval" in judged.out
    publish(tmp_path, "mine", interval=[right - 0.1, right - 0.05])
    assert "outside, above, of" in command("reproduce", "mine.json", "--out", folder).out


def test_without_a_name_they_are_listed(command: Command, tmp_path: Path) -> None:
    publish(tmp_path / "results", "small", interval=[0.1, 0.345])
    line = next(line for line in command("reproduce").out.splitlines() if "small" in line)
    for shown in ("tiny", "arithmetic", "20.0 %", "10.0 to 34.5 %", "0.5", "one abacus"):
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
    assert "is no result of two seeds or more" in refused.err
