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
# Scripts for mypy alone: they hold mistakes on purpose.
collect_ignore_glob.append(str(Path(__file__).parent / "tests/typed_scripts/*"))
# vLLM has an environment of its own, and this is the one file that runs there.
collect_ignore_glob.append(
    str(Path(__file__).parent / "src/posttrain/rollout/engines/vllm_worker*")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where pytest-timeout is not to be had, its setting in pyproject.toml means nothing."""
    if not importlib.util.find_spec("pytest_timeout"):
        parser.addini("timeout", "of pytest-timeout", default="0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` and ``vllm`` where there is none."""
    there = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
        "vllm": ("POSTTRAIN_VLLM_PYTHON" in os.environ, "needs vLLM's environment: make vllm"),
    }
    for name, (found, reason) in there.items():
        for item in items:
            if not found and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


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
