"""``metrics.jsonl``: one JSON object a line, one line for each ``log`` call, never rewritten.

A record is complete when its newline is there. Each goes to the operating system in one write, so a
killed process loses nothing it logged, and leaves at most one torn line, which the next writer cuts
off and readers skip.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from posttrain.disk import check_there, writing
from posttrain.track.encoding import encode_json, encode_number
from posttrain.track.stage import Stage

FILE_NAME = "metrics.jsonl"
_BLOCK = 1 << 16


class JsonlTracker:
    """Appends to ``metrics.jsonl`` in the stage's folder."""

    def __init__(self, stage: Stage) -> None:
        self.path = stage.folder / FILE_NAME
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._size = _cut_torn_line(self.path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, …}``; a failed write leaves the file as it was."""
        if "step" in metrics:
            raise ValueError("metrics: 'step' is the step's own name; call the metric otherwise")
        numbers = {name: encode_number(value) for name, value in metrics.items()}
        line = encode_json({"step": int(step), **numbers}) + b"\n"
        with writing(self.path):
            check_there(self.path, self._file.fileno())
            _append(self._file, line, size=self._size)
        self._size += len(line)

    def close(self) -> None:
        """Bring the file to the disk and close it; a second call does nothing."""
        if not self._file.closed:
            with self._file, writing(self.path):
                os.fsync(self._file.fileno())
                check_there(self.path, self._file.fileno())


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines to a file, or nothing; a torn line that a crash has left is cut off."""
    with writing(path), path.open("ab", buffering=0) as file:
        _append(file, lines, size=_cut_torn_line(path))


def _append(file: FileIO, data: bytes, *, size: int) -> None:
    """Write all of it behind ``size`` bytes; a failed write leaves the file as it was."""
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        with contextlib.suppress(OSError):  # an error of the clean-up must not hide the first one
            file.truncate(size)
        raise


def _cut_torn_line(path: Path) -> int:
    """Cut off what stands after the last newline, and return the size that is left."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        while size > 0:
            start = max(0, size - _BLOCK)
            file.seek(start)
            newline = file.read(size - start).rfind(b"\n")
            size = start + newline + 1
            if newline >= 0:
                break
        file.truncate(size)
        return size
