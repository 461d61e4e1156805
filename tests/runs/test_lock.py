"""One run folder, one process; the lock goes when its process goes, whatever ends it."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from posttrain.runs import lock
from posttrain.runs.lock import FILE_NAME, FolderInUseError, held

HOLD = """
import sys, os, time
from pathlib import Path
from posttrain.runs.lock import held
with held(sys.argv[1]):
    if len(sys.argv) > 2 and os.fork() == 0:  # as a worker that grades
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(process.pid)
    return process


def end(process: subprocess.Popen[str]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_process_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    other = holder(tmp_path)
    try:
        with pytest.raises(FolderInUseError) as refused, held(tmp_path):
            pass
        text = str(refused.value)
        assert f"{tmp_path}: process {other.pid} on {os.uname().nodename}, since 20" in text
        assert "choose another run.folder" in text
        shutil.copytree(tmp_path, tmp_path / "copy")
        with held(tmp_path / "copy"):  # it names a process, and is free all the same
            pass
    finally:
        end(other)


@pytest.mark.parametrize("options", [(), ("with a worker",)])
def test_a_killed_process_leaves_no_lock(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Not even where a process that it forked lives on."""
    other = holder(tmp_path, *options)
    other.kill()
    other.wait()
    try:
        assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == other.pid
        with held(tmp_path):
            assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()
    finally:
        if options:
            end(other)
        elif other.stdout is not None:
            other.stdout.close()


def test_the_same_process_cannot_take_it_twice_and_gives_it_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with held(folder):
        with pytest.raises(FolderInUseError), held(folder):
            pass
        with pytest.raises(FolderInUseError), held(folder):  # the failure did not release it
            pass
    assert (folder / FILE_NAME).read_bytes() == b""
    with pytest.raises(ZeroDivisionError), held(folder):
        _ = 1 / 0
    with held(folder):
        pass


def test_what_is_no_run_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is not a run folder"), held(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    entered = []
    with pytest.warns(UserWarning, match="cannot be locked .* no other process"), held(tmp_path):
        entered.append(True)
    assert entered


def test_a_system_without_flock_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    with pytest.warns(UserWarning, match="this system has no flock"), held(tmp_path):
        pass


def test_whoever_only_looks_is_waited_for(tmp_path: Path) -> None:
    """``posttrain runs`` tries the lock for an instant: a run that starts then is not refused."""
    with (tmp_path / FILE_NAME).open("wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, fcntl.flock, (looking, fcntl.LOCK_UN))
        timer.start()
        with held(tmp_path):
            assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()
        timer.join()


def test_a_lock_that_its_holder_has_removed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails goes with its new folder, and the lock in it: a third may hold another."""
    taken = lock._take

    def late(descriptor: int, folder: Path) -> None:
        (folder / FILE_NAME).unlink()
        (folder / FILE_NAME).touch()
        taken(descriptor, folder)

    monkeypatch.setattr(lock, "_take", late)
    with pytest.raises(FolderInUseError, match="another process"), held(tmp_path):
        pass
