"""What every test and every docstring example shares."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: test processes with several threads each fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

# Triton comes for Linux alone: elsewhere its kernels cannot be imported to look for examples.
collect_ignore_glob = (
    []
    if importlib.util.find_spec("triton")
    else [
        str(path)
        for path in Path(__file__).parent.glob("src/posttrain/fast/kernels/*.py")
        if path.stem not in ("__init__", "plain")
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def a_slow_device() -> Iterator[None]:
    """No check calls a run slow: how busy this machine is must not matter to a test."""
    from posttrain.check import speed
    from posttrain.models.roofline import Peak

    slow = Peak(bytes_per_second=1e3, flops_per_second=1e3, source="pinned for tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "measured_peak", lambda device, dtype: slow)
        yield


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    """A float64 model computes nothing in float32: for tests to more digits than that has."""
    from exact_arithmetic import float64_throughout

    with float64_throughout():
        yield
