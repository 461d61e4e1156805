"""What is freed on a CPU is kept for the next operation, and by no worker process."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from posttrain.learn.memory import keep_freed

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
WORK = """
import os, resource, torch
from posttrain.forked import settle
from posttrain.learn.memory import keep_freed

def passes():
    kept = [torch.empty(2**20).fill_(1.0) for _ in range(50)]  # 4 MiB each
    return sum(one[0] for one in kept)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    passes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
COUNT = (
    WORK
    + """
{call}
print(*[faults() for _ in range(20)])
"""
)
FORK = (
    WORK
    + """
keep_freed(torch.device("cpu"))
passes()
child = os.fork()
if not child:
    settle(64)
    try:
        passes()
    except (MemoryError, RuntimeError):
        os._exit(7)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        pytest.skip("memory may be another library's")
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("a C library that has no such setting")


@pytest.mark.usefixtures("glibc")
def test_memory_that_was_freed_is_used_again_without_being_cleared_anew() -> None:
    """Pages are counted that the kernel had to find and clear."""

    def later_faults(call: str) -> int:
        code = COUNT.format(call=call)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return sum(map(int, done.stdout.split()[10:]))

    assert later_faults("keep_freed(torch.device('cpu'))") * 10 < later_faults("")


@pytest.mark.usefixtures("glibc")
def test_a_worker_has_none_of_what_is_kept() -> None:
    """200 MiB were freed and kept; a fork that may have 64 MiB cannot take them."""
    assert subprocess.run([sys.executable, "-c", FORK], check=False).returncode == 7


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
    keep_freed(torch.device("cpu"))
    assert set(asked) == {"mallopt"}
    asked.clear()
    monkeypatch.setenv(name, "1")
    keep_freed(torch.device("cpu"))
    assert asked == []
