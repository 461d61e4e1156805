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
        kept = len(whole_lines(path)) if step and path.exists() else 0
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


def whole_lines(path: Path) -> bytes:
    """What stands there, without a line that a kill has cut."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]
