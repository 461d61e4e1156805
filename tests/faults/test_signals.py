"""Ctrl-C and SIGTERM at any moment of any command: one line, the shell's exit code, no traceback.

A moment is a number of events that Python reports about itself (a module is looked for, a file
opened, a process copied …): the signal comes in the middle of the same work on every machine,
however busy it is.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import RECIPE

from posttrain.config import recipe_from_dict, to_toml

SOURCE = Path(__file__).parents[2] / "src"
# Raises the signal at the given event of the main thread, counted from when signals are taken: what
# comes before is Python itself. At its end it says how many events there were.
SCRIPT = """
import _thread, atexit, os, signal, sys
moment, number, *sys.argv = int(sys.argv[1]), int(sys.argv[2]), "posttrain", *sys.argv[3:]
place, events = (os.getpid(), _thread.get_ident()), 0

def count(name, details):
    global events
    if (os.getpid(), _thread.get_ident()) == place:
        events += 1
        if events == moment:
            signal.raise_signal(number)

def take_signals():
    taken()
    sys.addaudithook(count)

import posttrain.cli
taken, posttrain.cli._take_signals = posttrain.cli._take_signals, take_signals
atexit.register(lambda: print("EVENTS", events, file=sys.stderr))
posttrain.cli.main()
"""


def command(*arguments: object, folder: Path, moment: int = 0, number: int = 2) -> tuple[int, str]:
    """The exit code of a command, and what it wrote to stderr."""
    words = [sys.executable, "-c", SCRIPT, moment, int(number), *arguments]
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small recipe, and a file to grade."""
    (tmp_path / "small.toml").write_text(to_toml(recipe_from_dict(RECIPE)))
    (tmp_path / "rows.jsonl").write_text('{"completion": "4", "answer": "4"}\n' * 20)
    return tmp_path


COMMANDS = {
    "run": ["run", "small.toml"],
    "check": ["check", "small.toml", "--fast"],
    "eval": ["eval", "tiny", "--task", "arithmetic", "--eval.problems", "4"],
    "generate": ["generate", "tiny", "1+1=", "--max-new-tokens", "4"],
    "grade": ["grade", "numeric", "rows.jsonl"],
}


MOMENTS = [("run", share) for share in (0.0, 0.3, 0.6, 0.85, 0.92, 0.95, 0.98)]
MOMENTS += [(name, share) for name in COMMANDS if name != "run" for share in (0.3, 0.85)]


@pytest.fixture(scope="module")
def totals() -> dict[str, int]:
    """How many moments each command has, as far as is known."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), MOMENTS)
def test_a_signal_at_any_moment_ends_in_one_line(
    name: str, share: float, *, folder: Path, totals: dict[str, int]
) -> None:
    number = signal.SIGINT if MOMENTS.index((name, share)) % 2 else signal.SIGTERM
    code, moment = 0, 0
    while not code:  # left alone it tells how many moments there are; with warm caches, fewer
        if name in totals:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            moment = 1 + int(share * totals[name])
        code, errors = command(*COMMANDS[name], folder=folder, moment=moment, number=number)
        if not code:
            found = int(errors.rpartition("EVENTS ")[2])
            totals[name] = min(found, totals.get(name, found + 1) - 1)
    assert "Traceback" not in errors, (moment, errors)
    assert code == 128 + number, (moment, errors)
    said = [line for line in errors.splitlines() if line.startswith("posttrain: stopped")]
    assert len(said) == 1, (moment, errors)
