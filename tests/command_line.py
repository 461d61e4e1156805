"""The command line as a terminal shows it, inside a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from posttrain.cli.app import main


class Result(NamedTuple):
    """What a command left on the screen, and its exit code."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


def command_in(
    folder: Path,
    *,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """A function that runs a command in a folder, on a screen of so many columns."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the working directory

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["posttrain", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command
