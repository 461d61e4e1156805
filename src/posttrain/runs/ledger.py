"""Which prompt groups were sampled, by whom, and in which step each was trained: once, exactly.

``ledger.jsonl`` is only ever added to, and a kill may cut its last line. A line is one of::

    {"begin": 4, "waiting": ["20/0", …]}      goes on after step 4; what waited there is kept
    {"sampled": [["20/0", 3, "engine 1", 2914], …]}    group, version, engine, digest of its tokens
    {"trained": 5, "groups": [["20/0", 2914], …]}

A group is the place of its batch in the cycle of prompts, and its number in the batch. What was
trained after the step that a run goes on from is trained again: those lines count no more.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from posttrain.disk import writing
from posttrain.types import Collected, Rollout

LEDGER = "ledger.jsonl"


class Ledger:
    """Writes the ledger of a stage, from any thread; each line is written at once."""

    def __init__(self, stage: Path, *, step: int, waiting: Sequence[Collected] = ()) -> None:
        self._lock = threading.Lock()
        self._path = path = stage / LEDGER
        kept = len(_whole_lines(path)) if step and path.exists() else 0
        with writing(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(kept)  # at once: a kill here must not cost the lines before
        there = [group for batch in waiting for group in _groups(batch)]
        self._write({"begin": step, "waiting": there})

    def noted(self, batches: Iterator[Collected]) -> Iterator[Collected]:
        """The same batches; each is in the ledger when it is handed on."""
        for batch in batches:
            sampled = [
                [group, rollouts[0].version, rollouts[0].engine, _digest(rollouts)]
                for group, rollouts in _groups(batch).items()
            ]
            self._write({"sampled": sampled})
            yield batch

    def trained(self, step: int, batch: Collected) -> None:
        """Note that a step has learned from a batch."""
        groups = [[group, _digest(rollouts)] for group, rollouts in _groups(batch).items()]
        self._write({"trained": step, "groups": groups})

    def wait(self) -> None:
        """Until all of it is on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock, writing(self._path):
            self._file.write((json.dumps(line) + "\n").encode())


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
    for line in _whole_lines(stage / LEDGER).splitlines():
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


def _groups(batch: Collected) -> dict[str, list[Rollout]]:
    """The rollouts of each group of a batch, by its name in the ledger."""
    found: dict[str, list[Rollout]] = {}
    for rollout in batch.rollouts:
        found.setdefault(f"{batch.position}/{rollout.group}", []).append(rollout)
    return found


def _digest(rollouts: Sequence[Rollout]) -> int:
    """A number that other tokens would change."""
    found = 0
    for rollout in rollouts:
        tokens = (len(rollout.prompt.tokens), *rollout.prompt.tokens, *rollout.tokens)
        found = zlib.crc32(array("q", tokens), found)
    return found


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _some(groups: Sequence[str] | Mapping[str, int]) -> str:
    named = ", ".join(list(groups)[:5])
    return f"{named} and {len(groups) - 5} more" if len(groups) > 5 else named
