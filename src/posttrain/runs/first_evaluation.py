"""The evaluation that a stage begins with, kept so that a resumed run need not do it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from posttrain.runs.files import SEAL, read_sealed, write_sealed
from posttrain.runs.folder import StageFolder

BEFORE, BEFORE_PROBLEMS = "before.json", "before.jsonl"
_PROBLEMS = "problems_sha256"


def write_before(stage: StageFolder, found: Mapping[str, Any]) -> None:
    """Keep what the evaluation before a stage found; its problems are written already."""
    write_sealed(stage.path / BEFORE, {**found, _PROBLEMS: _digest(stage)})


def read_before(stage: StageFolder) -> dict[str, Any] | None:
    """What :func:`write_before` kept, or None; an error where that or the problems have changed."""
    path = stage.path / BEFORE
    if not path.exists():
        return None
    found = read_sealed(path, _PROBLEMS, SEAL)
    if found.pop(_PROBLEMS) != _digest(stage):
        raise ValueError(
            f"{stage.path / BEFORE_PROBLEMS}: has changed since it was written, or is gone; put it "
            f"back as it was, or remove {path}: a run that is resumed evaluates again"
        )
    del found[SEAL]
    return found


def _digest(stage: StageFolder) -> str:
    path = stage.path / BEFORE_PROBLEMS
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()
