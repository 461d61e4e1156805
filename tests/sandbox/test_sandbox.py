"""The sandbox itself: what crosses it, how it starts and ends, and its system-call filter."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards import code_tests
from posttrain.sandbox import Limits, available, bubblewrap, outcome
from posttrain.sandbox.seccomp import MACHINES, REFUSED, filter_program
from posttrain.sandbox.wire import NotPlainError, decode, encode

WHY_NOT = available()[0].why_not
SANDBOXES = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")),
    "none",
]
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
SQUARE = "def square(n):\n    return n * n\n"
SQUARES = "assert square(2) == 4\nassert square(3) == 9\n"

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)
    | st.lists(inner).map(tuple) | st.sets(st.integers()) | st.frozensets(st.text()),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_plain_data_survives_the_wire(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("forged", [{"code": "x"}, {"handle": 0}, {}, {"int": "1", "set": []}, [1]])
def test_forged_data_is_refused(forged: Any) -> None:
    with pytest.raises((NotPlainError, ValueError)):
        decode(forged)


@pytest.mark.parametrize("tests", [SQUARES, [{"input": "", "output": ""}]])
@pytest.mark.parametrize("front", [["false"], ["sh", "-c", "echo no space >&2; exit 1"]])
def test_a_sandbox_that_does_not_start_is_broken(
    front: list[str], tests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "")
    monkeypatch.setattr(bubblewrap, "command", lambda *_: front)
    score = code_tests(SQUARE, tests)
    assert score.state == "crashed"
    assert "the sandbox did not start" in score.reason
    assert front == ["false"] or "no space" in score.reason


def test_a_sandbox_that_hangs_at_the_start_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "START_SECONDS", 0.2)
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "")
    monkeypatch.setattr(bubblewrap, "command", lambda *_: ["sh", "-c", "sleep 60"])
    assert code_tests(SQUARE, SQUARES).state == "crashed"


@pytest.mark.parametrize(
    ("option", "message"),
    [({"seconds": 0}, "seconds"), ({"memory_mb": 1}, "memory_mb"), ({"output_kb": 0}, "output_kb")],
)
def test_limits_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**option)


def test_the_filter_refuses_by_number() -> None:
    """Interpret the program: an oracle that shares nothing with the code that wrote it."""
    for column, machine in enumerate(MACHINES):
        architecture, clone, clone3 = MACHINES[machine]
        for name, numbers in REFUSED.items():
            if numbers[column] is not None:
                assert verdict(machine, architecture, numbers[column]) == 0x50001, name
        assert verdict(machine, architecture, clone, 0x11) == 0x50001  # fork
        assert verdict(machine, architecture, clone, 0x10000011) == 0x50001  # a namespace
        assert verdict(machine, architecture, clone, 0x3D0F00) == 0x7FFF0000  # a thread
        assert verdict(machine, architecture, clone3) == 0x50000 | 38
        assert verdict(machine, architecture, 0) == 0x7FFF0000
        assert verdict(machine, architecture, 0x40000000) == 0x80000000  # x32
        assert verdict(machine, 0x40000003, 0) == 0x80000000  # i386
    with pytest.raises(ValueError, match="no system-call filter"):
        filter_program("pdp11")


def verdict(machine: str, architecture: int, number: Any, argument: int = 0) -> int:
    program = memoryview(filter_program(machine))
    accumulator, place = 0, 0
    while True:
        word = bytes(program[8 * place : 8 * place + 8])
        code, value = int.from_bytes(word[:2], "little"), int.from_bytes(word[4:], "little")
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = {0: number, 4: architecture, 16: argument}[value]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: accumulator & value}
        place += word[2] if holds[code] else word[3]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_graded_from_many_threads(sandbox: Any) -> None:
    """No descriptor of one grading leaks into another's processes, or holds them up."""
    found: list[float] = []

    def grade(code: str) -> None:
        found.append(code_tests(code, SQUARES, sandbox=sandbox, seconds=20).value)

    wrong = "def square(n): return 4"
    threads = [threading.Thread(target=grade, args=(c,)) for c in [SQUARE, wrong] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0.0] * 4 + [1.0] * 4


def descendants(process: int) -> set[int]:
    """Every process below one, by the parents that /proc names."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry))
    found, waiting = set(), [process]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():  # or for ever: the runner's time limit says so
        time.sleep(0.05)


@needs_sandbox
@pytest.mark.parametrize("how", ["timeout", "we are killed"])
def test_nobody_survives(how: str) -> None:
    """Neither when the time is up, nor when the grading process itself is killed."""
    script = (
        "from posttrain.rewards import code_tests\n"
        f"code_tests('while True: pass', 'assert f(1)', seconds={6 if how == 'timeout' else 60})\n"
        "input()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process, process.stdin:
        # bubblewrap, its first process inside and Python: for the worker and for the examiner
        wait_until(lambda: len(descendants(process.pid)) >= 6)
        below = descendants(process.pid)
        if how == "we are killed":
            process.kill()
        wait_until(lambda: not any(Path(f"/proc/{number}").exists() for number in below))


@needs_sandbox
def test_what_the_solution_holds() -> None:
    """No descriptor besides the standard ones, its own two pipes, and one to nowhere."""
    code = (
        "import os, stat\n"
        "def held():\n    found = []\n    for fd in range(3, 2**16):\n"
        "        try: mode = os.fstat(fd).st_mode\n        except OSError: continue\n"
        "        found.append('pipe' if stat.S_ISFIFO(mode) else oct(stat.S_IFMT(mode)))\n"
        "    return sorted(found)\n"
    )
    score = code_tests(code, "assert held() == ['0o20000', 'pipe', 'pipe'], held()")
    assert score.value == 1.0, score.reason


def test_no_process_and_no_descriptor_is_left() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for code in (SQUARE, "import os; os._exit(1)", "while True: pass"):
        code_tests(code, SQUARES, sandbox="none", seconds=0.5)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_script_of_system_packages_never_fails() -> None:
    script = Path(__file__).parents[2] / "scripts" / "system_packages.sh"
    environment = {"PATH": "/nowhere"}
    result = subprocess.run(
        ["/bin/sh", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "bubblewrap" in result.stdout
