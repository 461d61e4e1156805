"""What environments replied, kept in a file: a run that goes on is told the same again.

``replies.jsonl`` has a line for each call of the engine: a table for each pass (samples, greedy)
of sequence to [digest of a turn, answer]. A call that was cut short has none, and is made anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.disk import writing
from posttrain.rollout.environment import Kept

REPLIES = "replies.jsonl"


class KeptReplies:
    """The replies of calls ``since`` one: those before are in a checkpoint, and dropped."""

    def __init__(self, stage: Path, *, since: int) -> None:
        self._path = path = stage / REPLIES
        self._lines: dict[int, bytes] = {}
        whole = path.read_bytes().split(b"\n")[:-1] if since >= 0 and path.exists() else []
        for line in whole:
            call = json.loads(line)["call"]
            if call >= since:
                self._lines[call] = line
        self._write()

    def known(self, call: int) -> list[dict[int, Kept]]:
        """What was replied in a call, pass by pass; nothing where it was not finished."""
        if call not in self._lines:
            return []
        passes = json.loads(self._lines[call])["passes"]
        return [{int(n): [(d, a) for d, a in kept] for n, kept in said.items()} for said in passes]

    def keep(self, call: int, said: Sequence[Mapping[int, Kept]]) -> None:
        """Write down what was replied in a call that is over."""
        self._lines[call] = json.dumps({"call": call, "passes": said}).encode()
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            file.write(self._lines[call] + b"\n")

    def drop(self, before: int) -> None:
        """Forget calls whose rollouts a checkpoint has behind it."""
        self._lines = {call: line for call, line in self._lines.items() if call >= before}
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".part")
        with writing(self._path):
            beside.write_bytes(b"".join(line + b"\n" for line in self._lines.values()))
            os.replace(beside, self._path)
