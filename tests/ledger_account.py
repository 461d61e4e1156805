"""What the ledger of a run comes to: whether every group that was sampled was trained once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.runs.ledger import LEDGER, whole_lines


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a ledger comes to: groups trained, and sampled or trained again because of a fault.

    ``problems`` are empty where every group that was sampled was trained exactly once.
    """

    trained: int
    sampled_again: int
    trained_again: int
    resumed: int
    engines: tuple[str, ...]
    problems: tuple[str, ...]


def read_ledger(stage: Path, *, finished: bool = True) -> Account:
    """Read the ledger of a stage; of one that is not ``finished``, groups may still wait."""
    reader = _Reader()
    for line in whole_lines(stage / LEDGER).splitlines():
        reader.read(json.loads(line))
    if finished and reader.open:
        reader.problems.append(f"sampled and never trained: {_some(reader.open)}")
    return Account(
        trained=len(reader.trained),
        sampled_again=reader.sampled_again,
        trained_again=reader.trained_again,
        resumed=reader.resumed,
        engines=tuple(sorted(reader.engines)),
        problems=tuple(reader.problems),
    )


class _Reader:
    """The state that the lines of a ledger lead to."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}  # sampled and not trained: the digest
        self.trained: dict[str, int] = {}  # the step
        self.engines: set[str] = set()
        self.problems: list[str] = []
        self.step = self.sampled_again = self.trained_again = 0
        self.resumed = -1
        self._digests: dict[str, tuple[int, int]] = {}  # by version

    def read(self, line: Mapping[str, Any]) -> None:
        if "begin" in line:
            self._begin(line["begin"], line["waiting"])
        elif "sampled" in line:
            for group, version, engine, digest in line["sampled"]:
                self._sampled(group, version, digest=digest)
                self.engines.add(engine)
        else:
            self._trained(line["trained"], line["groups"])

    def _begin(self, step: int, waiting: Sequence[str]) -> None:
        self.resumed += 1
        if step > self.step:
            self.problems.append(f"goes on after step {step}, and only {self.step} were trained")
        undone = [group for group, trained in self.trained.items() if trained > step]
        self.trained_again += len(undone)
        for group in undone:
            del self.trained[group]
        unknown = [group for group in waiting if group not in self._digests]
        if unknown:
            self.problems.append(f"waited at step {step} and never sampled: {_some(unknown)}")
        self.open = {g: self._digests[g][1] for g in waiting if g in self._digests}
        self.step = step

    def _sampled(self, group: str, version: int, *, digest: int) -> None:
        if group in self.trained or group in self.open:
            self.problems.append(f"sampled although it was there: {group}")
        known = self._digests.get(group)
        self.sampled_again += known is not None
        if known is not None and known[0] == version and known[1] != digest:
            self.problems.append(f"sampled again, by the same weights, as other tokens: {group}")
        self._digests[group] = (version, digest)
        self.open[group] = digest

    def _trained(self, step: int, groups: Sequence[tuple[str, int]]) -> None:
        if step != self.step + 1:
            self.problems.append(f"step {step} comes after step {self.step}")
        self.step = step
        for group, digest in groups:
            if group in self.trained:
                self.problems.append(f"trained in steps {self.trained[group]} and {step}: {group}")
            elif self.open.pop(group, None) != digest:
                self.problems.append(f"trained in step {step} as it was not sampled: {group}")
            self.trained[group] = step


def _some(groups: Sequence[str] | Mapping[str, int]) -> str:
    named = ", ".join(list(groups)[:5])
    return f"{named} and {len(groups) - 5} more" if len(groups) > 5 else named
