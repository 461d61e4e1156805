"""A disk that is full or may not be written: a clear error, nothing lost, no half file.

The real thing where this machine lets us mount a small file system; elsewhere, and for what root
can always do, the error of the operating system is injected.
"""

import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from loop_parts import rollout
from small_model import OPTIONS
from small_runs import recipe, same_weights, small_run

from posttrain.data.preference_sets import read_preferences
from posttrain.disk import MovedError, NotWrittenError
from posttrain.learn.batch_file import write_batch
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.report import plot_curves
from posttrain.runs import (
    new_folder,
    read_metrics,
    read_rollouts,
    replacing,
    write_json,
    write_rollouts,
    write_text,
)
from posttrain.runs.files import check_writable
from posttrain.runs.token_numbers import read_tokens
from posttrain.track import JsonlTracker, Stage
from posttrain.track.diagnosis import read_findings
from posttrain.track.jsonl import append_lines
from posttrain.types import Batch

LARGE = "x" * 400_000
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux refuses files in /proc")


def save_model(path: Path) -> None:
    save_policy(load_policy("tiny", options=OPTIONS), path)


def fill_folder(path: Path) -> None:
    with new_folder(path) as folder:
        (folder / "small").write_text("whole")
        (folder / "large").write_text(LARGE)


def large_batch(path: Path) -> None:
    with replacing(path) as beside:
        write_batch(beside, Batch.from_rewards(torch.zeros(50_000)))


def log(path: Path) -> None:
    tracker = JsonlTracker(Stage(name="rl", folder=path.parent, total_steps=1))
    try:
        tracker.log(1, {LARGE: 1.0})
    finally:
        tracker.close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: write_text(path, LARGE),
    "json": lambda path: write_json(path, {"text": LARGE}),
    "rollouts": lambda path: write_rollouts(
        path, [rollout(1.0, tokens=range(100_000))] * 4, step=1
    ),
    "curves": lambda path: plot_curves(
        [{"step": n, "reward/mean": n % 7, "rollout/length": n % 5} for n in range(99)], path
    ),
    "folder": fill_folder,
    "batch": large_batch,
    "model": save_model,
    "lines": lambda path: append_lines(path, LARGE.encode() + b"\n"),
    "metrics.jsonl": log,
}


def mounted(path: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted(path, "size=20k")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def resized(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_a_clear_error_and_leaves_no_half_file(name: str, disk: Path) -> None:
    (disk / "old").write_text("old")
    before = content(disk)
    with pytest.raises(NotWrittenError, match="the disk is full") as failed:
        WRITERS[name](disk / name)
    assert str(failed.value).startswith(f"{disk / name}: cannot be written: ")
    assert "free some space, then run the same command again" in str(failed.value)
    after = {path: found for path, found in content(disk).items() if found}
    assert after == before, "something was left behind"
    assert {path.name for path in disk.iterdir()} <= {"old", name}
    resized(disk, "size=20m")
    WRITERS[name](disk / name)
    assert content(disk).keys() > before.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_disk_is_a_clear_error(name: str, disk: Path) -> None:
    resized(disk, "ro")
    with pytest.raises(NotWrittenError, match="the file system is read-only"):
        WRITERS[name](disk / name)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("name", ["text", "json", "rollouts", "curves", "folder", "batch", "model"])
def test_other_refusals_are_clear_and_leave_the_old_content(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the refusal is injected where the content reaches the disk."""

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(NotWrittenError, match=f"{name}: cannot be written") as failed:
        WRITERS[name](tmp_path / name)
    assert failed.value.errno == number
    assert os.strerror(number) in str(failed.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("", "it is a folder"),
        ("pipe", "it is a device or a pipe"),
        ("file/report.html", "a part of its path is a file"),
        ("file/deeper/report.html", "a part of its path is a file"),
        ("n" * 300, "its name is too long"),
        pytest.param("/proc/report.html", "its folder cannot be made", marks=LINUX),
        pytest.param("/proc/runs/report.html", "its folder cannot be made", marks=LINUX),
    ],
)
def test_a_place_where_no_file_can_be_is_named_with_what_to_do(
    place: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for write in (check_writable, lambda path: write_text(path, "x")):
        with pytest.raises(NotWrittenError, match=f"cannot be written: {why}") as failed:
            write(tmp_path / place)
        assert str(tmp_path / place) == failed.value.filename
        assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}
        assert (tmp_path / "pipe").is_fifo()


def test_errors_that_are_not_about_writing_stay_what_they_are(tmp_path: Path) -> None:
    others = [FileNotFoundError(2, "gone", named) for named in (None, b"as bytes", 99, "x")]
    for error in (ValueError("x"), OSError("no number"), *others):
        with pytest.raises(type(error)) as raised, replacing(tmp_path / "file"):
            raise error
        assert raised.value is error


def test_findings_after_a_torn_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.jsonl"
    line = json.dumps({"finding": "a", "step": 1}).encode() + b"\n"
    append_lines(path, line)
    with path.open("ab") as file:
        file.write(b'{"finding": "to')
    append_lines(path, line.replace(b"1", b"2"))
    assert [found["step"] for found in read_findings(path)] == [1, 2]


def whole(folder: Path) -> None:
    """Every file that a run has left can be read, and there is no other."""
    for path in folder.rglob("*"):
        assert not path.name.endswith(".tmp"), path
        assert not (path.is_dir() and path.name.startswith(".")), path
        if path.name == "metrics.jsonl":
            assert path.read_bytes()[-1:] in (b"\n", b"")
            read_metrics(path)
        elif path.suffix == ".json" and path.stat().st_size:
            json.loads(path.read_text())
        elif path.suffix == ".parquet" and path.parent.name == "tokens":
            assert read_tokens(path.parent, step=int(path.stem.split("-")[1]))
        elif path.suffix == ".parquet":
            assert read_rollouts(path.parent, step=int(path.stem.split("-")[1]))
        elif path.name == "pairs.jsonl":
            read_preferences(path)


@pytest.mark.parametrize("size", ["60k", "160k", "200k"])
def test_a_run_on_a_disk_that_fills_up_is_finished_after_there_is_room(
    size: str, disk: Path, tmp_path: Path
) -> None:
    """And its model is, bit for bit, that of a run that was never disturbed."""
    resized(disk, f"size={size}")
    folder = disk / "run"
    unwritten = pytest.warns(UserWarning, match="no checkpoint: .*the disk is full")
    with unwritten, pytest.raises(NotWrittenError, match="the disk is full"):
        small_run(recipe(folder))
    whole(folder)
    resized(disk, "size=20m")
    done, _ = small_run(recipe(folder))
    whole(folder)
    undisturbed, _ = small_run(recipe(tmp_path / "undisturbed"))
    assert same_weights(done.model, undisturbed.model)


def test_a_disk_with_room_for_the_models_alone_is_enough(disk: Path, tmp_path: Path) -> None:
    """A checkpoint of 39,712 weights takes 477 kB, the model 159 kB."""
    resized(disk, "size=400k")
    sections = dict.fromkeys(("rl", "eval", "rewards"))
    with pytest.warns(UserWarning, match="no checkpoint: .*the disk is full"):
        done, _ = small_run(recipe(disk / "run", **sections))
    whole(disk / "run")
    assert not list((disk / "run").glob("*/checkpoints"))
    undisturbed, _ = small_run(recipe(tmp_path / "undisturbed", **sections))
    assert same_weights(done.model, undisturbed.model)


def limited_run(tmp_path: Path, num_bytes: int) -> "subprocess.CompletedProcess[str]":
    """The command ``run``, for sft, where no file may be larger; works without root too."""
    lines = [
        "run.seed = 1",
        f"run.folder = {str(tmp_path / 'run')!r}",
        "model.options = {hidden_size = 32, num_layers = 2, max_positions = 64}",
        'task = {name = "arithmetic", digits = 1, num_train = 40, num_test = 10}',
        "sft = {batch_size = 20}",
    ]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return subprocess.run(
        [sys.executable, "-m", "posttrain.cli", "run", str(tmp_path / "recipe.toml")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_limit_of_file_size_ends_the_command_with_a_message(tmp_path: Path) -> None:
    """No traceback, and the records before it are whole."""
    found = limited_run(tmp_path, 30_000)
    assert found.returncode == 2, found.stderr
    assert "cannot be written: the file is larger than allowed" in found.stderr
    assert "Traceback" not in found.stderr
    whole(tmp_path / "run")
    assert not (tmp_path / "run" / "sft" / "model").exists()


def test_a_checkpoint_that_no_one_asked_for_does_not_cost_the_model(tmp_path: Path) -> None:
    """39,712 weights: 159 kB of model/ may be written, AdamW's moments of twice that may not."""
    found = limited_run(tmp_path, 250_000)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("! no checkpoint: ") == 1
    assert "step-000002: cannot be written: the file is larger than allowed" in found.stderr
    assert "if the run is killed, it starts over from step 0" in found.stderr
    whole(tmp_path / "run")
    sft = tmp_path / "run" / "sft"
    assert load_policy(str(sft / "model")).model is not None
    assert not (sft / "checkpoints").exists()


@pytest.mark.parametrize(
    "error",
    [
        NotWrittenError(errno.ENOSPC, "/runs/a/file", then="resume it"),
        MovedError("/runs/a", then="resume it"),
    ],
)
def test_an_error_of_writing_is_the_same_in_another_process(error: OSError) -> None:
    """A learner's rank raises it there, and the run goes by its type and its words here."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.errno, back.filename) == (str(error), error.errno, error.filename)
