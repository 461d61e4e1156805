"""Runs at a glance: what each was, how far it came, and what sets some of them apart.

A folder may be half written, of another version, or made by someone else: whatever is wrong with
one is said of that one, and the others are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.runs.drift import settings
from posttrain.runs.folder import RunFolder
from posttrain.runs.held_out import held_out
from posttrain.runs.lock import is_held
from posttrain.runs.metrics import merge_steps, series
from posttrain.track.curves import ends

State = Literal["finished", "running", "unfinished", "broken"]
DEPTH = 3  # folders below the one that is searched
# What reading a file that is not what it should be can raise.
BROKEN = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
    RecursionError,
)


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One run in a line; None is what it does not have, ``problem`` why it cannot be read.

    ``accuracy_by`` is the reward that checks answers; where none does, ``full_marks`` are the
    shares of each reward before and after. ``reward_first`` and ``reward_last`` are means over
    ``reward_steps`` training steps.
    """

    path: Path
    state: State
    stages: tuple[str, ...] = ()
    algorithm: str | None = None
    steps_done: int | None = None
    steps: int | None = None
    accuracy_by: str = ""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    full_marks: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    reward_steps: int | None = None
    seconds: float | None = None
    findings: int = 0
    problem: str = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name or str(self.path)


def find_runs(folder: str | Path = "runs") -> list[Path]:
    """The run folders in a folder, by name; the folder itself where it is one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name one that holds runs, or a run")
    if (folder / "run.json").exists():
        return [folder]
    marks = (
        mark for depth in range(1, DEPTH + 1) for mark in folder.glob("*/" * depth + "run.json")
    )
    return sorted(mark.parent for mark in marks)


def overview(path: str | Path) -> Overview:
    """What there is to say of a run folder; a broken one is no error, it is said."""
    path = Path(path)
    try:
        return _overview(path)
    except BROKEN as error:
        said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        return Overview(path=path, state="broken", problem=said.removeprefix(f"{path}: "))


def compare(paths: Sequence[str | Path]) -> dict[str, list[str]]:
    """The settings in which runs differ, by dotted name, each run's value in order.

    Where a run's config cannot be read, its values are ``?``; one that a run lacks is ``unset``.
    """
    configs: list[dict[str, str] | None] = []
    for path in paths:
        try:
            configs.append(settings(RunFolder(path).config))
        except BROKEN:
            configs.append(None)
    names = sorted({name for config in configs if config is not None for name in config})
    differing = {}
    for name in names:
        values = ["?" if config is None else config.get(name, "unset") for config in configs]
        known = {value for value, config in zip(values, configs, strict=True) if config is not None}
        if len(known) > 1 and name != "run.folder":
            differing[name] = values
    return differing


def _overview(path: Path) -> Overview:
    run = RunFolder(path)
    config, summary = run.config, run.summary or {}
    section = _mapping(config.get("rl")) or _mapping(config.get("sft"))
    trained = next(
        (name for name in ("rl", "reward", "sft") if run.stage(name).metrics.exists()), ""
    )
    records = merge_steps(run.stage(trained).records()) if trained else []
    rewards = ends(series(records, "reward/mean"))
    found = held_out(run)
    values = {
        name: (share.before and share.before.value, share.after and share.after.value)
        for name, share in found.shares().items()
    }
    before, after = values.pop("accuracy", (None, None))
    return Overview(
        path=path,
        state="finished" if run.finished else "running" if is_held(path) else "unfinished",
        stages=tuple(run.stages),
        algorithm=_text(_mapping(config.get("rl")).get("algorithm")),
        steps_done=int(records[-1]["step"]) if records else None,
        steps=_count(section.get("steps")) if trained == "rl" else None,
        accuracy_by=found.accuracy_by,
        accuracy_before=_number(before),
        accuracy_after=_number(after),
        full_marks={
            name.removeprefix("full_marks/"): (_number(first), _number(last))
            for name, (first, last) in values.items()
        },
        reward_first=rewards.first if rewards else None,
        reward_last=rewards.last if rewards else None,
        reward_steps=rewards.num if rewards else None,
        seconds=_number(summary.get("seconds")),
        findings=len(run.findings()),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
