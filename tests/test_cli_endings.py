"""However a command ends, it says why, with an exit code that a shell understands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command, command_in

from posttrain.build.interrupts import Stopped
from posttrain.cli import explain

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    return command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "posttrain: stopped\n"),
        (Stopped(15), 143, "posttrain: stopped\n"),
        (BrokenPipeError(32, "Broken pipe"), 2, "posttrain: [Errno 32] Broken pipe\n"),
        (ConnectionResetError(104, "Reset"), 2, "posttrain: [Errno 104] Reset\n"),
        (SystemExit(1), 2, "posttrain: ended by sys.exit(1) in code that posttrain called\n"),
        (SystemExit(), 2, "posttrain: ended by sys.exit(None) in code that posttrain called\n"),
        (RuntimeError("no"), 2, "posttrain: no\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_no_end_is_silent(
    posttrain: Command,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def show(names: list[str]) -> None:
        raise error

    monkeypatch.setattr(explain, "explain", show)
    result = posttrain("explain")
    assert (result.code, result.err) == (code, words)


def test_how_a_run_can_go_on_is_the_line(
    posttrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(names: list[str]) -> None:
        stop = Stopped(2, saved=3)
        stop.args = ("stopped after step 3, which is saved; to go on: posttrain resume runs/a",)
        raise stop

    monkeypatch.setattr(explain, "explain", show)
    result = posttrain("explain")
    assert result.code == 130
    assert result.err == (
        "posttrain: stopped after step 3, which is saved; to go on: posttrain resume runs/a\n"
    )


@pytest.mark.parametrize("printed", ["explain", "generate"])
def test_a_reader_that_has_seen_enough_is_no_error(printed: str, tmp_path: Path) -> None:
    """As in ``posttrain explain | head -1``: no traceback, no word, the exit code of SIGPIPE."""
    words = {"explain": ["explain"], "generate": ["generate", "tiny", "a", "--max-new-tokens=2"]}
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "posttrain.cli", *words[printed]],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            check=False,
        )
    finally:
        os.close(writing)
    said = [line for line in done.stderr.decode().splitlines() if "so far" not in line]
    assert (done.returncode, said) == (141, [])
