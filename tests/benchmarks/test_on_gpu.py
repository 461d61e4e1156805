"""The list of GPU jobs: options their scripts take, order, limits, and going on after a cut."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import on_gpu

    return on_gpu


def python(code: str) -> str:
    return f"-c {shlex.quote(code)}"


def call(on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *argv])
    try:
        on_gpu.main()
    except SystemExit as end:
        return end.code
    return 0


def done(out: Path) -> dict[str, str]:
    return {
        name: entry["ended"] for name, entry in json.loads((out / "done.json").read_text()).items()
    }


@pytest.mark.parametrize(
    "script",
    [
        "real_models",
        "rollout",
        "calculator",
        "compare_trl",
        "adapters",
        "distill_qwen",
        "lora_sums",
    ],
)
def test_every_option_of_a_job_is_one_of_its_script(on_gpu: ModuleType, script: str) -> None:
    file = f"benchmarks/{script}.py"
    (job,) = [job for job in on_gpu.JOBS.values() if job.command.startswith(file)]
    told = subprocess.run(
        [sys.executable, FOLDER / f"{script}.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = [word for word in job.command.split() if word.startswith("--")]
    assert options
    assert [option for option in options if option not in told.split()] == []


def test_jobs_run_in_order_and_what_is_done_is_not_run_again(
    on_gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = on_gpu.Job
    monkeypatch.setattr(
        on_gpu,
        "JOBS",
        {
            "fails": job(command=python("raise(ValueError(3))"), minutes=1),
            "works": job(command=python("print('{gsm8k}')"), minutes=1),
            "wants": job(command=python("print('{other}')"), minutes=1),
            "hangs": job(command=python("__import__('time').sleep(600)"), minutes=0.02),
        },
    )
    out = tmp_path / "out"
    for part in ("train", "test"):
        (tmp_path / f"{part}.jsonl").touch()
    options = ["--out", str(out), "--gsm8k", str(tmp_path)]
    assert call(on_gpu, monkeypatch, *options) == 1
    assert done(out) == {
        "fails": "with code 1, see fails.log",
        "works": "well",
        "hangs": "by its limit, see hangs.log",
    }
    assert "ValueError: 3" in (out / "fails.log").read_text()
    assert (out / "works.log").read_text().strip() == str(tmp_path)
    assert "wants: left out, it needs --models other=" in capsys.readouterr().out
    monkeypatch.setitem(on_gpu.JOBS, "fails", job(command=python("print(4)"), minutes=1))
    assert call(on_gpu, monkeypatch, *options, "--only", "fails", "works") == 0
    told = capsys.readouterr().out
    assert "fails: ended well" in told
    assert "works" not in told


def test_when_the_minutes_are_over_no_job_begins(
    on_gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--out", str(tmp_path), "--minutes", "0.5", "--only", "tests"]
    assert call(on_gpu, monkeypatch, *options) == 1
    assert "tests: left out, 0.5 minutes are over" in capsys.readouterr().out
    assert not (tmp_path / "done.json").exists()


def test_vllms_packages_are_before_ours_where_it_is_asked_alone(on_gpu: ModuleType) -> None:
    paths = [
        on_gpu.environment(on_gpu.JOBS[name], "vllm/packages")["PYTHONPATH"].split(":")
        for name in ("steps", "tests")
    ]
    assert paths[0][0] == "vllm/packages"
    assert paths[0][1] == paths[1][0] == str(FOLDER.parent / "src")


@pytest.mark.parametrize("given", ["smollm2", "smollm2="])
def test_a_model_without_a_name_or_a_file_is_refused(on_gpu: ModuleType, given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write NAME="):
        on_gpu.pairs(given)


def test_what_is_not_there_costs_only_the_jobs_that_need_it(
    on_gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = on_gpu.Job
    jobs = {
        "gone": job(command=python("print('{a}')"), minutes=1),
        "broken": job(command=python("print('{b}')"), minutes=1),
        "data": job(command=python("print('{gsm8k}')"), minutes=1),
        "package": job(command=python("print()"), minutes=1, packages=("json", "no_such")),
        "works": job(command=python("print(5)"), minutes=1),
    }
    monkeypatch.setattr(on_gpu, "JOBS", jobs)
    (tmp_path / "b.gguf").write_text("no model")
    (tmp_path / "c.gguf").write_text("of no job, so not looked at")
    models = [f"{name}={tmp_path / name}.gguf" for name in "abc"]
    options = ["--out", str(tmp_path / "out"), "--gsm8k", str(tmp_path), "--models", *models]
    assert call(on_gpu, monkeypatch, *options) == 1
    assert done(tmp_path / "out") == {"works": "well"}
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("b: not imported, ended with code ")
    assert told[1:5] == [
        "gone: left out, it needs --models a=",
        "broken: left out, it needs --models b=",
        "data: left out, it needs --gsm8k",
        "package: left out, it needs packages: no_such",
    ]


def test_a_job_that_is_cut_ends_what_it_has_started_and_says_all_it_knows(
    on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script that waits for a run, which saves itself when it is asked to stop."""
    (tmp_path / "run.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(time.sleep(0.5) or print('saved')))\n"
        "print('runs')\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "script.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'run.py')!r}])\n"
    )
    jobs = {"cut": on_gpu.Job(command=str(tmp_path / "script.py"), minutes=0.25)}
    monkeypatch.setattr(on_gpu, "JOBS", jobs)
    assert call(on_gpu, monkeypatch, "--out", str(tmp_path)) == 1
    assert done(tmp_path) == {"cut": "by its limit, see cut.log"}
    assert (tmp_path / "cut.log").read_text().split() == ["runs", "saved"]
