"""A checkpoint that no one asked for and that cannot be written: said, and the run goes on.

Time is a number that the tests move, and the disk is full where they say so.
"""

import contextlib
import errno
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import given, go, same

from posttrain.disk import NotWrittenError
from posttrain.learn import learner as learner_module
from posttrain.runs import StageFolder
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.interrupts import Interrupts, Stopped
from posttrain.runs.keeper import Keeper


class Disk:
    """A clock, and a disk that is full or not; ``fill`` writes a file, and ``tried`` counts it."""

    def __init__(self) -> None:
        self.now, self.cost = 1000.0, 0.0
        self.full = False
        self.tried: list[float] = []
        self.signal: signal.Signals | None = None

    def __call__(self) -> float:
        return self.now

    def fill(self, folder: Path) -> dict[str, Any]:
        self.tried.append((self.now - 1000.0) / 60)
        self.now += self.cost
        (folder / "half").write_text("half")
        if self.signal is not None:
            signal.raise_signal(self.signal)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "half"))
        return {}

    def step(self, made: Keeper, number: int, **more: Any) -> None:
        """A step of four minutes."""
        self.now += 240
        made.stepped(number, more=self.fill, **more)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]


def left(folder: StageFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("*"))


def test_by_time_it_is_said_once_and_tried_again_after_the_interval(
    tmp_path: Path, disk: Disk
) -> None:
    """Steps of 4 minutes: due at 12, 24, 36, 48. The first is written, two find the disk full.

    A third failure, after one that could be written again, has something new to say: from where.
    """
    folder = StageFolder(tmp_path)
    made = Keeper(folder, save_minutes=10.0, keep_last=2, clock=disk)
    with heard() as said, made.stepping():
        for step in range(1, 16):
            disk.full = step in (6, 9, 15)
            disk.step(made, step)
            assert left(folder) == [f"step-{n:06d}" for n in (3, 12) if n <= step]
    assert disk.tried == [12, 24, 36, 48, 60]
    first, second = said
    assert first.startswith(
        f"no checkpoint: {folder.checkpoint(6)}: cannot be written: the disk is full (No space "
        "left on device); if the run is killed, it starts over from step 3."
    )
    assert "the next is tried after 10 minutes" in first
    assert "free some space" in first
    assert "starts over from step 12." in second


def test_attempts_that_fail_stay_below_a_hundredth_of_the_time(tmp_path: Path, disk: Disk) -> None:
    """Each takes 30 s before the disk is full, 1 % of 50 minutes: that is when the next comes."""
    disk.full, disk.cost = True, 30.0
    made = Keeper(StageFolder(tmp_path), save_minutes=10.0, clock=disk)
    with heard() as said, made.stepping():
        for step in range(1, 30):
            disk.step(made, step)
    assert disk.tried == [12, 64.5, 117]
    (text,) = said
    assert "the next is tried after 50 minutes" in text


def test_at_the_end_of_a_stage(tmp_path: Path, disk: Disk) -> None:
    disk.full = True
    made = Keeper(StageFolder(tmp_path), save_minutes=10.0, clock=disk)
    with heard() as said, made.stepping():
        disk.step(made, 1, last=True)
    (text,) = said
    assert "starts over from step 0" in text
    assert "next is tried" not in text
    assert left(StageFolder(tmp_path)) == []


@pytest.mark.parametrize("last", [False, True])
def test_one_that_was_asked_for_is_an_error(tmp_path: Path, disk: Disk, last: bool) -> None:
    """By save_every, although it would be time for one as well."""
    disk.full = True
    made = Keeper(StageFolder(tmp_path), save_minutes=1.0, clock=disk)
    with made.stepping(), pytest.raises(NotWrittenError, match="the disk is full"):
        disk.step(made, 2, every=3 if last else 2, last=last)


@pytest.mark.parametrize("due", [False, True])
def test_the_one_at_ctrl_c_is_an_error(tmp_path: Path, disk: Disk, due: bool) -> None:
    disk.full = True
    with Interrupts() as interrupts:
        made = Keeper(
            StageFolder(tmp_path),
            interrupts=interrupts,
            save_minutes=1.0 if due else 0.0,
            clock=disk,
        )
        with made.stepping():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(NotWrittenError, match="the disk is full"):
                disk.step(made, 1)


@pytest.mark.parametrize("full", [False, True])
def test_ctrl_c_while_it_is_written_never_claims_a_step_that_is_not_saved(
    tmp_path: Path, disk: Disk, full: bool
) -> None:
    disk.full, disk.signal = full, signal.SIGTERM
    with Interrupts() as interrupts:
        made = Keeper(StageFolder(tmp_path), interrupts=interrupts, save_minutes=1.0, clock=disk)
        with made.stepping(), pytest.raises(NotWrittenError if full else Stopped) as ended:
            disk.step(made, 1)
    if isinstance(ended.value, Stopped):
        assert ended.value.saved == 1
        assert checkpoint_steps(StageFolder(tmp_path)) == [1]


def test_rollouts_that_cannot_be_written_are_no_checkpoint(tmp_path: Path, disk: Disk) -> None:
    """A checkpoint waits for them, and finds that they are lost: that is an error."""

    def fails(folder: Path) -> dict[str, Any]:
        raise NotWrittenError(errno.ENOSPC, tmp_path / "rollouts" / "step-000001.parquet")

    made = Keeper(StageFolder(tmp_path), save_minutes=1.0, clock=disk)
    with made.stepping(), pytest.raises(NotWrittenError, match=r"rollouts/step-000001\.parquet"):
        made.stepped(1, last=True, more=fails)


def test_the_model_is_that_of_a_run_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint after the last step does not fit, in sft and in rl: both models are there."""
    values = given(tmp_path / "full", {})
    del values["run"]["save_minutes"]

    def full(learner: Any, folder: Path) -> dict[str, Any]:
        (folder / "optimizer.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, heard() as said:
        patch.setattr(learner_module, "save_learner", full)
        done, _ = go(values)
    assert len([text for text in said if text.startswith("no checkpoint: ")]) == 2
    for stage in ("sft", "rl"):
        assert not done.folder.stage(stage).checkpoints.exists()
    whole, _ = go(given(tmp_path / "whole", {}))
    same(done.folder, whole.folder)
