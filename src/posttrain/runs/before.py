"""What a run folder held before a run was started in it, kept there until a step is done.

``.before.tmp`` holds the old run, or nothing where there was none; all else of a run is then of the
new one. While the old run is moved there or back, the name is ``.moving.tmp``, and nothing of a new
one is there. So a kill at any moment loses nothing. Only what a run writes is moved or removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

BEFORE, MOVING = ".before.tmp", ".moving.tmp"
# All that a run writes into its folder, but for its lock: see posttrain.runs.folder.
_OURS = re.compile(
    r"\.(.+\.)?\d+\.tmp|\.(base|start)-.*|(run|config|places|threads|summary|samples|changes)\.json"
    r"|recipe\.toml|curves\.png|(sft|prefer|reward|dpo|rl|eval)(\.old-\d+)?|adapters"
    r"|(base|start|vllm)-\w+|report\.html|report-\w+-metrics\.csv"
)


def is_ours(name: str) -> bool:
    """Whether a run writes what has this name in its folder."""
    return _OURS.fullmatch(name) is not None


def in_doubt(run: Path) -> bool:
    """Whether a start in this folder has come neither to its first step nor to its end."""
    return (run / BEFORE).exists() or (run / MOVING).exists()


def keep_before(run: Path) -> None:
    """Make room for a new run; a folder that is no run's holds nothing that would be in its way."""
    (run / MOVING).mkdir()
    if (run / "run.json").exists():
        _move(run, run / MOVING)
    os.replace(run / MOVING, run / BEFORE)


def put_back(run: Path) -> None:
    """Let a folder hold what it held before the start, if one is in doubt."""
    if (run / BEFORE).exists():
        for entry in filter(lambda entry: is_ours(entry.name), list(run.iterdir())):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        os.replace(run / BEFORE, run / MOVING)
    if (run / MOVING).exists():
        _move(run / MOVING, run)
        (run / MOVING).rmdir()


def forget_nothing(run: Path) -> None:
    """Where the folder held nothing before, let what is in it stay, whatever happens next."""
    with contextlib.suppress(OSError):  # it is not empty: an old run, which stays until a step
        (run / BEFORE).rmdir()


def forget_before(run: Path) -> None:
    """Remove what a run folder held before; by another name first, for it may be put back no more.

    Of several adapters that begin at once, one does it.
    """
    gone = run / f".{time.time_ns()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.replace(run / BEFORE, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    for entry in list(source.iterdir()):
        if is_ours(entry.name):
            os.replace(entry, target / entry.name)
