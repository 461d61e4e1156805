"""Whole files: the old content or the new one, never a half, and nothing left lying about."""

import os
from pathlib import Path

import pytest

from posttrain.report import plot_curves
from posttrain.runs import new_folder, read_json, replacing, write_json, write_text
from posttrain.runs.rollouts import write_rollouts

WRITERS = {
    "text": lambda path: write_text(path, "new"),
    "json": lambda path: write_json(path, {"new": 1}),
    "rollouts": lambda path: write_rollouts(path, [], step=1),
    "curves": lambda path: plot_curves([], path),
}


class Crash(BaseException):
    """What no handler expects."""


@pytest.mark.parametrize("writer", WRITERS)
def test_a_crash_before_the_rename_leaves_the_old_file(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def crash(source: Path, target: Path) -> None:
        assert source.parent == target.parent  # a rename across disks is not one
        assert source.stat().st_size > 0
        raise Crash

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(Crash):
        WRITERS[writer](path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_new_version_replaces_the_old(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    WRITERS[writer](path)
    first = path.read_bytes()
    path.write_bytes(b"old")
    WRITERS[writer](path)
    assert path.read_bytes() == first != b"old"
    assert list(path.parent.iterdir()) == [path]


def test_content_is_synced_before_the_rename_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename, sync = os.replace, os.fsync

    def record_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    def record_sync(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "fsync", record_sync)
    write_text(tmp_path / "file", "new")
    with new_folder(tmp_path / "model") as folder:
        (folder / "weights").write_bytes(b"1")
    if os.path.isdir("/proc/self/fd"):
        assert events == ["file", "rename", "folder", "file", "folder", "rename", "folder"]
    assert events.count("rename") == 2


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail() -> None:
        with replacing(path) as beside:
            beside.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-000001"

    def crash() -> None:
        with new_folder(path) as folder:
            (folder / "weights").write_bytes(b"half")
            raise Crash

    with pytest.raises(Crash):
        crash()
    assert list(path.parent.iterdir()) == []
    with new_folder(path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_bytes(b"whole")
        assert not path.exists()
    assert (path / "deep" / "weights").read_bytes() == b"whole"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(FileExistsError, match="already exists"), new_folder(path):
        pass
    assert (path / "deep" / "weights").read_bytes() == b"whole"


def test_json_comes_back_and_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"accuracy": 0.5, "where": Path("a/b"), "worst": float("nan")})
    assert read_json(path) == {"accuracy": 0.5, "where": "a/b", "worst": "NaN"}
    path.write_text('{"accuracy": 0.')
    with pytest.raises(ValueError, match=r"summary\.json: is not JSON"):
        read_json(path)
