"""Checkpoints: folders that are whole or not there, and that prove it when they are read.

::

    STAGE/checkpoints/step-000050/
      manifest.json     size and SHA-256 of every other file, written last
      state.json        plain numbers: where the stage stands
      model/            an ordinary Hugging Face folder; what else there is, the learner knows

A folder is filled beside, synced and renamed. One that a failing disk or a hand has torn since is
found out by its manifest, and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.runs.files import new_folder, read_json, write_json
from posttrain.runs.folder import StageFolder
from posttrain.runs.manifest import find_changes, read_manifest, write_manifest
from posttrain.runs.rollouts import TOKENS, rollout_file, rollout_steps

LAYOUT = 2  # of what the stages keep in it: an older one lacks what they go on from
STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_LEFTOVERS = (".*.tmp", ".model-*")  # what a killed process was writing


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was verified, and its state."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The step it was written after."""
        return int(self.state["step"])


def write_checkpoint(
    stage: StageFolder, step: int, *, fill: Callable[[Path], dict[str, Any]]
) -> Path:
    """Write the checkpoint after a step: ``fill`` writes files, and returns what state.json holds.

    The metrics so far are brought to the disk before, so that no checkpoint is ahead of them.
    """
    path = stage.checkpoint(step)
    size = 0
    if stage.metrics.exists():
        with stage.metrics.open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
    if path.exists():  # of an attempt that went on from an older one: this is the same again
        remove(path)
    with new_folder(path) as folder:
        state = {**fill(folder), "layout": LAYOUT, "step": step, "metrics_bytes": size}
        write_json(folder / STATE, state)
        write_manifest(folder)
    return path


def checkpoint_steps(stage: StageFolder) -> list[int]:
    """The steps after which there is a checkpoint, in order, whole or not."""
    found = (_NAME.fullmatch(path.name) for path in stage.checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def newest(stage: StageFolder) -> tuple[Checkpoint | None, list[str]]:
    """The last checkpoint that is whole, or None; and what is wrong with those after it."""
    problems: list[str] = []
    for step in reversed(checkpoint_steps(stage)):
        path = stage.checkpoint(step)
        problem = find_fault(path)
        if problem is None:
            state = dict(read_json(path / STATE))
            size = stage.metrics.stat().st_size if stage.metrics.exists() else 0
            if size >= state["metrics_bytes"]:
                return Checkpoint(path=path, state=state), problems
            problem = f"{stage.metrics.name} lacks the records that belong to it"
        problems.append(f"{path}: {problem}")
    return None, problems


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where every file is as it was written."""
    try:
        if changes := find_changes(path, read_manifest(path)):
            return ", ".join(changes)
        layout = read_json(path / STATE)["layout"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({error})"
    if layout == LAYOUT:
        return None
    return f"was written by another version of posttrain: layout {layout}, this one knows {LAYOUT}"


def prune(stage: StageFolder, *, keep_last: int, keep_best: int = 0) -> None:
    """Remove checkpoints but the newest, and the best by held-out accuracy or else reward.

    ``keep_last = 0`` keeps all.
    """
    steps = checkpoint_steps(stage)
    if keep_last == 0:
        return
    kept = set(steps[-keep_last:])
    if keep_best:
        measured = {step: _accuracy(stage.checkpoint(step)) for step in steps}
        known = [step for step in steps if measured[step] is not None]
        known.sort(key=lambda step: (measured[step], step), reverse=True)
        kept |= set(known[:keep_best])
    for step in steps:
        if step not in kept:
            remove(stage.checkpoint(step))


def cut_back(stage: StageFolder, checkpoint: Checkpoint | None) -> None:
    """Take a stage back to a checkpoint, or to its beginning: what came after it will come again.

    Metrics, rollouts, later (torn) checkpoints, and what a killed process was writing.
    """
    step, size = 0, 0
    if checkpoint is not None:
        step, size = checkpoint.step, int(checkpoint.state["metrics_bytes"])
    for folder in (stage.path, stage.checkpoints, stage.rollouts, stage.path / TOKENS):
        _remove_leftovers(folder)
    for later in checkpoint_steps(stage):
        if later > step:
            remove(stage.checkpoint(later))
    for folder in (stage.rollouts, stage.path / TOKENS):
        for later in rollout_steps(folder):
            if later > step:
                rollout_file(folder, later).unlink()
    if stage.metrics.exists():
        with stage.metrics.open("rb+") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def clear(stage: StageFolder, *, keep_last: int = 0) -> None:
    """Remove the checkpoints of a stage but the newest, and what a killed process was writing.

    Killed in the middle, and called again, it ends the same.
    """
    if keep_last and checkpoint_steps(stage):
        prune(stage, keep_last=keep_last)
        _remove_leftovers(stage.checkpoints)
    elif stage.checkpoints.is_dir():
        remove(stage.checkpoints)
    _remove_leftovers(stage.path)


def _remove_leftovers(folder: Path) -> None:
    for pattern in _LEFTOVERS:
        for left in folder.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def remove(path: Path) -> None:
    """Remove a checkpoint; killed in the middle, it leaves nothing that looks like one."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _accuracy(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path / STATE).get("accuracy")
        return None if found is None else float(found)
    return None
