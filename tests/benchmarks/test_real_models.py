"""The benchmark of real weights: which jobs it runs, ours end to end, and what failures leave."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILE = FOLDER / "real_models.py"


@pytest.fixture
def real_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import real_models

    return real_models


def labels(real_models: ModuleType, *more: str) -> list[str]:
    given = real_models.arguments(["--models", "a=x", "b=y", "--gsm8k", "z", *more])
    works = [
        real_models.Work(
            model=name,
            source=source,
            gsm8k="z",
            folder="f",
            device="cpu",
            **real_models.sizes(given),
        )
        for name, source in given.models
    ]
    return [label for label, _, _ in real_models.jobs(given, works)]


def test_jobs_are_chosen_by_all_words_of_any_choice(real_models: ModuleType) -> None:
    assert labels(real_models, "--only", "a sampling", "b prepare") == [
        "a sampling posttrain",
        "a sampling vllm",
        "b prepare",
    ]
    sizes = ["--micro-batches", "32", "64"]
    assert labels(real_models, "--only", "a steps trl", "b steps trl-vllm 64", *sizes) == [
        "a steps trl 32",
        "a steps trl 64",
        "b steps trl-vllm 64",
    ]
    assert labels(real_models, "--curve", "--only", "b") == [
        "b curve posttrain",
        "b curve trl-vllm",
        "b curve evaluate",
    ]


@pytest.mark.parametrize("more", [[], ["--models", "a=x"], ["--models", "a", "--gsm8k", "z"]])
def test_what_is_missing_is_said(
    real_models: ModuleType, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        real_models.arguments(more)
    assert ("NAME=VALUE" if "a" in more else "give --models and --gsm8k") in capsys.readouterr().err


def test_the_minutes_of_a_curve_are_those_of_training(
    real_models: ModuleType, tmp_path: Path
) -> None:
    from real_curve import draw, evaluate

    ours, peer = tmp_path / "curve_ours" / "rl", tmp_path / "curve_trl"
    ours.mkdir(parents=True)
    peer.mkdir()
    records = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "time/step": 30.0},
        {"step": 2, "time/step": 60.0, "eval/accuracy": 0.5},
    ]
    (ours / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (peer / "minutes.jsonl").write_text("")
    work = real_models.Work(
        model="a",
        source="",
        gsm8k="",
        folder=str(tmp_path),
        device="cpu",
        prompts=1,
        group=1,
        new_tokens=1,
        rounds=1,
        steps=1,
    )
    rows = list(evaluate(work))
    found = [(row["who"], row["step"], row["minutes"], row["accuracy"]) for row in rows]
    assert found == [
        ("posttrain", 0, 0.0, 0.25),
        ("posttrain", 2, 1.5, 0.5),
        ("TRL + vLLM", 0, 0.0, 0.25),  # both start from one model
    ]
    draw([{"model": "a", **row} for row in rows], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ours_end_to_end_and_a_peer_that_is_not_there(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k"
    data.mkdir()
    for split, count in (("train", 8), ("test", 2)):
        rows = [{"question": f"{split} {n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out" / "real.json"
    command = [sys.executable, str(FILE), "--models", "small=tiny", "--gsm8k", str(data)]
    command += ["--json", str(out), "--prompts", "2", "--group", "2", "--new-tokens", "5"]
    command += ["--rounds", "1", "--steps", "1", "--path", f"vllm={tmp_path / 'broken'}"]
    command += ["--only", "prepare", "sampling", "learning", "steps posttrain"]
    (tmp_path / "broken" / "vllm").mkdir(parents=True)
    (tmp_path / "broken" / "vllm" / "__init__.py").write_text("raise OSError('no such engine')")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(out.read_text())
    rows = {(row["what"], row["case"]): row for row in report["rows"]}
    assert {who["who"] for who in report["rows"]} == {"posttrain"}
    assert rows["sampling", "fixed"]["mean_length"] == 5
    assert rows["sampling", "ragged"]["mean_length"] <= 5
    assert rows["learning", "fixed"]["mfu"] > 0
    assert rows["steps", "ragged"]["samples_per_s"] > 0
    assert "no such engine" in report["failed"]["small sampling vllm"]  # and the others went on
    assert "| small | fixed | posttrain |" in done.stdout
    command[-4:] = ["prepare", "sampling posttrain"]
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "begins" not in again.stdout  # what is done is not run again
    assert json.loads(out.read_text())["rows"] == report["rows"]
