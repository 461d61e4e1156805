"""What is freed on a CPU is kept for the next operation."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from posttrain.learn.memory import keep_freed

REFUSES = "import ctypes, sys; sys.exit(not ctypes.CDLL(None).mallopt(-3, 1 << 30))"
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
COUNT = """
import resource, torch
from posttrain.learn.memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = torch.empty(3 * 2**22).fill_(1.0)
    second = first + first
    third = first * second
    del first
    second + third
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{call}
print(*[faults() for _ in range(20)])
"""


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        pytest.skip("memory may be another library's")
    if subprocess.run([sys.executable, "-c", REFUSES], capture_output=True, check=False).returncode:
        pytest.skip("a C library that has no such setting")


@pytest.mark.usefixtures("glibc")
def test_memory_that_was_freed_is_used_again_without_being_cleared_anew() -> None:
    """Pages are counted that the kernel had to find and clear."""

    def later_faults(call: str) -> int:
        code = COUNT.format(call=call)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return sum(map(int, done.stdout.split()[10:]))

    assert later_faults("keep_freed()") * 10 < later_faults("")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is never touched")
@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_user_has_set_of_malloc_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Library:
        def __getattr__(self, function: str) -> Any:
            asked.append(function)
            return lambda *_: 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    for other in SETTINGS:
        monkeypatch.delenv(other, raising=False)
    keep_freed()
    assert set(asked) == {"mallopt"}
    asked.clear()
    monkeypatch.setenv(name, "1")
    keep_freed()
    assert asked == []
