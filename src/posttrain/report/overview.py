"""Runs at a glance: what each was, how far it came, and how runs differ.

A folder may be half written, of another version, or made by someone else: a problem with one is
reported in its row, and the others are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from posttrain.report.facts import TRAINED, RunFacts, number_or_none
from posttrain.report.held_out import Change
from posttrain.runs.drift import settings
from posttrain.runs.folder import RunFolder
from posttrain.runs.lock import is_held

State = Literal["finished", "running", "unfinished", "broken"]
T = TypeVar("T")
DEPTH = 3  # levels of folders that are searched
# Exceptions of reading a damaged or foreign file.
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
    """One run in a line; missing values are None, ``problem`` says why it cannot be read.

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
    full_marks: Mapping[str, Change] = field(default_factory=dict)
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
    """The run folders in a folder, by name; one that is a run itself, with its adapters."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name one that holds runs, or a run")
    if (folder / "run.json").exists():
        inner = (mark.parent for mark in folder.glob("adapters/*/run.json"))
        return [folder, *sorted(inner, key=_counted)]
    depths = range(1, DEPTH + 1)
    try:
        marks = [mark for depth in depths for mark in folder.glob("*/" * depth + "run.json")]
    except OSError as error:  # of a folder that changes while it is searched, like /proc
        raise ValueError(f"{folder}: cannot be searched ({error}); name one of runs") from error
    return sorted((m.parent for m in marks if m.parent.name[0] != "."), key=_counted)


def _counted(path: Path) -> list[tuple[int, str]]:
    """An order in which 10 comes after 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in path.parts]


def overview(path: str | Path) -> Overview:
    """The overview of a run folder; a broken one has a ``problem`` and raises nothing."""
    path = Path(path)
    try:
        return _overview(RunFacts(RunFolder(path)))
    except BROKEN as error:
        text = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        return Overview(path=path, state="broken", problem=text.removeprefix(f"{path}: "))


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
    known = [config for config in configs if config is not None]
    differing = {}
    for name in sorted({name for config in known for name in config} - {"run.folder"}):
        if len({config.get(name, "unset") for config in known}) > 1:
            values = ["?" if config is None else config.get(name, "unset") for config in configs]
            differing[name] = values
    return differing


def arrow(before: float | None, after: float | None, *, pattern: str, unknown: str = "") -> str:
    """A number before and after.

    >>> arrow(0.5, 1, pattern="{:.0%}"), arrow(None, 1, pattern="{:.0%}", unknown="-")
    ('50% → 100%', '- → 100%')
    """
    if before is None and after is None:
        return unknown
    shown = [unknown if value is None else pattern.format(value) for value in (before, after)]
    return " → ".join(filter(None, shown))


def _overview(facts: RunFacts) -> Overview:
    run = facts.run
    config = {name: _known(run.config.get(name), dict) or {} for name in ("rl", "sft")}
    trained = next((name for name in TRAINED if run.stage(name).metrics.exists()), "")
    records = facts.records(trained) if trained else []
    steps = (
        number_or_none((config["rl"] or config["sft"]).get("steps")) if trained == "rl" else None
    )
    reward = facts.reward
    shares: dict[str, Change] = {
        name: (number_or_none(share.values[0]), number_or_none(share.values[1]))
        for name, share in facts.held_out.shares().items()
    }
    before, after = shares.pop("accuracy", (None, None))
    return Overview(
        path=run.path,
        state="finished" if run.finished else "running" if is_held(run.path) else "unfinished",
        stages=tuple(run.stages),
        algorithm=_known(config["rl"].get("algorithm"), str),
        steps_done=int(records[-1]["step"]) if records else None,
        steps=None if steps is None else int(steps),
        accuracy_by=facts.held_out.accuracy_by,
        accuracy_before=before,
        accuracy_after=after,
        full_marks={name.removeprefix("full_marks/"): both for name, both in shares.items()},
        reward_first=reward and reward.first,
        reward_last=reward and reward.last,
        reward_steps=reward and reward.num,
        seconds=facts.seconds,
        findings=len(facts.findings),
    )


def _known(value: Any, kind: type[T]) -> T | None:
    return value if isinstance(value, kind) else None
