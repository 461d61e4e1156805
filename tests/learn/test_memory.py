"""What is freed on a CPU is kept for the next operation."""

import ctypes
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="a C library that has no such setting",
)
def test_memory_that_was_freed_is_used_again_without_being_cleared_anew() -> None:
    """Pages are counted that the kernel had to find and clear."""

    def later_faults(call: str) -> int:
        code = COUNT.format(call=call)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return sum(map(int, done.stdout.split()[10:]))

    assert later_faults("keep_freed()") * 10 < later_faults("")
