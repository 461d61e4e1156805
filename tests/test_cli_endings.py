"""However a command ends, it says why, with an exit code that a shell understands."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command, command_in

from posttrain.cli import explain
from posttrain.runs.interrupts import Stopped

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    return command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)


class Odd(BaseException):
    """No exception that anyone expects."""


class MuteError(ValueError):
    def __str__(self) -> str:
        raise TypeError("it cannot even say what it is")


class PipeError(OSError):
    """Python makes a BrokenPipeError of an OSError, and not of this."""


HERE = Path(__file__).name
# What a command may be ended by, its exit code, and what the last line says of it.
ENDINGS: list[tuple[BaseException, int, str]] = [
    (KeyboardInterrupt(), 130, "posttrain: stopped$"),
    (Stopped(15), 143, "posttrain: stopped$"),
    (BrokenPipeError(32, "Broken pipe"), 2, rf"\[Errno 32\] Broken pipe \(BrokenPipe.*{HERE}:"),
    (PipeError(32, "Broken pipe"), 2, rf"\[Errno 32\] Broken pipe \(PipeError at .*{HERE}:"),
    (BrokenPipeError(), 1, rf"BrokenPipeError: no message \(at .*{HERE}:"),
    (ConnectionResetError(104, "Reset"), 2, rf"\[Errno 104\] Reset \(Connection.*{HERE}:"),
    (FileNotFoundError(2, "No file", "a.toml"), 2, r"\[Errno 2\] No file: 'a.toml'"),
    (SystemExit(1), 2, rf"ended by sys.exit\(1\) in code that posttrain called \(.*{HERE}:"),
    (SystemExit(), 2, r"ended by sys.exit\(None\) in code"),
    (SystemExit(0), 2, r"ended by sys.exit\(0\) in code"),
    (SystemExit("enough"), 2, r"ended by sys.exit\('enough'\) in code"),
    (RuntimeError("no"), 2, rf"posttrain: no \(RuntimeError at .*{HERE}:"),
    (ValueError("\x1b[2Jgone"), 2, r"posttrain: \\x1b\[2Jgone \(ValueError at"),
    (ValueError(), 1, rf"ValueError: no message \(at .*{HERE}:\d+\); .*please report"),
    (AssertionError(), 1, rf"AssertionError: no message \(at .*{HERE}:"),
    (MuteError(), 1, r"posttrain: MuteError: no message"),
    (KeyError("x"), 1, r"posttrain: KeyError: 'x' \(at"),
    (EOFError(), 1, r"posttrain: EOFError: no message"),
    (StopIteration(), 1, r"posttrain: StopIteration: no message"),
    (MemoryError(), 1, r"posttrain: MemoryError: no message .*not enough memory"),
    (RecursionError("too deep"), 1, r"posttrain: RecursionError: too deep"),
    (ModuleNotFoundError("No module named 'x'"), 1, r"ModuleNotFoundError: No module named 'x'"),
    (GeneratorExit(), 1, r"posttrain: GeneratorExit: no message"),
    (asyncio.CancelledError(), 1, r"posttrain: CancelledError: no message"),
    (Odd(), 1, r"posttrain: Odd: no message"),
    (ExceptionGroup("two", [KeyError("x"), OSError("y")]), 1, r"KeyError: 'x'; OSError: y"),
    (BaseExceptionGroup("odd", [Odd("z")]), 1, r"BaseExceptionGroup: odd .*: Odd: z"),
]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    ENDINGS,
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("moment", ["options", "command"])
def test_no_end_is_silent(
    posttrain: Command,
    monkeypatch: pytest.MonkeyPatch,
    *,
    moment: str,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def fails(*given: object) -> None:
        raise error

    if moment == "command":
        monkeypatch.setattr(explain, "explain", fails)
        result = posttrain("explain")
    else:
        monkeypatch.setattr("posttrain.cli.app.TyperGroup.parse_args", fails)
        result = posttrain("explain")
    *before, last = result.err.splitlines()
    assert result.code == code
    assert last.startswith("posttrain: ")
    assert re.search(words, last), last
    assert bool(before) == (code == 1)  # a traceback, of what no one foresaw
    assert "\x1b" not in result.err


def test_what_posttrain_itself_says_is_all_there_is(posttrain: Command) -> None:
    result = posttrain("explain", "grppo")
    assert result.code == 2
    assert result.err.startswith("posttrain: ")
    assert ".py:" not in result.err
    assert "Error" not in result.err


def test_a_folder_that_is_gone_is_said(posttrain: Command, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = posttrain("explain", "grpo")
    assert result.code == 2
    assert result.err.startswith("posttrain: the current folder was deleted or moved; cd to")


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain"], "No space left on device"),
        (["run", "nowhere.toml"], "no such recipe"),
    ],
)
@pytest.mark.parametrize("output", ["full", "unread"])
def test_only_an_output_that_nobody_reads_ends_in_silence(
    words: list[str], said: str, *, output: str, tmp_path: Path
) -> None:
    """A full disk does not, nor any other mistake where the reader has gone as well."""
    if output == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "posttrain.cli", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            check=False,
        )
    finally:
        os.close(writing)
    silent = output == "unread" and words == ["explain"]
    lines = [line for line in done.stderr.decode().splitlines() if "so far" not in line]
    assert done.returncode == (141 if silent else 2)
    assert len(lines) == (0 if silent else 1), lines
    assert all(said in line for line in lines)
