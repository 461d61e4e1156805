"""What environments replied, kept in a file: a run that goes on is told the same again.

``replies.jsonl`` has a line for each call of the engine: a table for each pass (samples, greedy)
of sequence to [digest of a turn, answer]. A call that was cut short has none, and is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.disk import writing
from posttrain.rollout.environment import Kept
from posttrain.types import Prompt

REPLIES = "replies.jsonl"


class KeptReplies:
    """The replies of calls ``since`` one: those before are in a checkpoint, and dropped.

    One thread may keep them while another says what was saved.
    """

    def __init__(self, stage: Path, *, since: int) -> None:
        self._path, self._since = stage / REPLIES, since
        self._lock = threading.Lock()
        self._lines = self._drop(before=since)

    def known(self, call: int, asked: str) -> list[dict[int, Kept]]:
        """What was replied in a call, pass by pass; nothing where it was not finished.

        Nothing either where other things were ``asked``; and what failed is asked anew.
        """
        line = json.loads(self._lines[call]) if call in self._lines else {}
        if line.get("asked") != asked:
            return []
        return [{int(n): _answered(kept) for n, kept in said.items()} for said in line["passes"]]

    def keep(self, call: int, asked: str, *, said: Sequence[Mapping[int, Kept]]) -> None:
        """Write down what was replied in a call that is over."""
        line = json.dumps({"call": call, "asked": asked, "passes": said}).encode()
        if self._lines.pop(call, None) == line:
            return  # it stands there, since before the run was cut
        with self._lock, writing(self._path), self._path.open("ab") as file:
            file.write(line + b"\n")

    def saved(self, learned: int) -> None:
        """A checkpoint has the calls before ``learned`` behind it.

        Those since the checkpoint before are kept: should this one be damaged, a run goes on there.
        """
        with self._lock:
            self._drop(before=self._since)
        self._since = learned

    def _drop(self, *, before: int) -> dict[int, bytes]:
        """Write the file without earlier calls; the lines that are left, the last of each call."""
        lines: dict[int, bytes] = {}
        # A line that was cut short is the last, and has no end.
        for line in self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []:
            call = json.loads(line)["call"]
            if call >= before:
                lines[call] = line
        beside = self._path.with_suffix(".part")
        with writing(self._path):
            beside.write_bytes(b"".join(line + b"\n" for line in lines.values()))
            os.replace(beside, self._path)
        return lines


def _answered(kept: Sequence[Sequence[Any]]) -> Kept:
    """The answers up to the first that failed."""
    failed = [place for place, (_, answer) in enumerate(kept) if "failure" in answer]
    return [(digest, answer) for digest, answer in kept[: failed[0] if failed else None]]


def digest_of(prompts: Sequence[Prompt], *, num_samples: int, seed: int) -> str:
    """What the replies of a call belong to: its prompts, how many samples of each, and its seed.

    >>> prompt = Prompt(id="0", text="2+3=", tokens=(5, 6))
    >>> digest_of([prompt], num_samples=2, seed=0) == digest_of([prompt], num_samples=2, seed=1)
    False
    """
    asked = [[prompt.id, prompt.tokens, repr(prompt.columns)] for prompt in prompts]
    text = json.dumps([asked, num_samples, seed])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
