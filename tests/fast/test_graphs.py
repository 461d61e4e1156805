"""What capture leaves behind where it fails; a stand-in for CUDA behaves as PyTorch 2.11 does."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.fast import graphs
from posttrain.fast.graphs import CaptureError, Pool, capturing

WAITS = "CUDA error: operation not permitted when stream is capturing\nmore"
FULL = "CUDA out of memory. Tried to allocate"


class Cuda:
    """The current stream, pools that are being captured in, and whether random numbers are had."""

    def __init__(self) -> None:
        self.stream = "own"
        self.underway: list[int] = []
        self.released: list[int] = []
        self.random = True
        self.workspaces: list[str] = []  # of what is done on which stream
        self.fails_at_end = ""  # the error of capture_end, before anything has been ended
        self.fails_after_end = ""  # that of instantiating the graph, when all has been

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def graph(self, graph: object, *, pool: int = 0, capture_error_mode: str) -> "Capture":
        assert capture_error_mode == "thread_local"
        return Capture(self, pool)

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)


class Capture:
    """torch.cuda.graph: it tidies up only where nothing fails."""

    def __init__(self, cuda: Cuda, pool: int) -> None:
        self.cuda, self.pool = cuda, pool

    def __enter__(self) -> None:
        self.before, self.cuda.stream, self.cuda.random = self.cuda.stream, "capture", False
        self.cuda.underway.append(self.pool)

    def __exit__(self, *_: object) -> None:
        if self.cuda.fails_at_end:
            error, self.cuda.fails_at_end = self.cuda.fails_at_end, ""
            raise RuntimeError(error)
        self.cuda.end(0, self.pool)
        self.cuda.random = True
        if self.cuda.fails_after_end:
            error, self.cuda.fails_after_end = self.cuda.fails_after_end, ""
            raise RuntimeError(error)
        self.cuda.stream = self.before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    handles = iter(range(1, 100))
    stand_in = {
        "graph": found.graph,
        "stream": found.on,
        "current_stream": lambda: found.stream,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: next(handles),
        "CUDAGraph": SimpleNamespace,
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    monkeypatch.setattr(
        torch._C,
        "_cuda_releasePool",
        lambda device, pool: found.released.append(pool),
        raising=False,
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_clearCublasWorkspaces",
        lambda: found.workspaces.clear(),
        raising=False,
    )
    monkeypatch.setattr(graphs.torch, "zeros", lambda *_, **__: None)
    return found


def tidy(cuda: Cuda) -> bool:
    return cuda.stream == "own" and cuda.random and not cuda.underway


def record(pool: Pool, error: Exception | None = None) -> None:
    with capturing(Any, pool):
        if error is not None:
            raise error


def test_what_is_captured_is_captured_alone(cuda: Cuda) -> None:
    pool, free = Pool(), []

    def ask() -> None:
        free.append(graphs.capture_lock.acquire(blocking=False))

    with capturing(Any, pool):
        assert cuda.underway == [pool.handle]
        other = threading.Thread(target=ask)
        other.start()
        other.join()
    assert free == [False]
    assert tidy(cuda)
    assert not pool.broken


@pytest.mark.parametrize("error", [None, RuntimeError(WAITS)])
def test_captures_share_no_workspace(cuda: Cuda, error: Exception | None) -> None:
    """Neither with those before, nor with those after."""
    cuda.workspaces.append("of an ordinary product")
    with contextlib.suppress(CaptureError), capturing(Any, Pool()):
        assert not cuda.workspaces
        cuda.workspaces.append("of one that is captured")
        if error is not None:
            raise error
    assert not cuda.workspaces


def test_a_model_that_waits(cuda: Cuda) -> None:
    pool, cuda.fails_at_end = Pool(), "CUDA error: operation failed due to a previous error"
    with pytest.raises(CaptureError, match=r"not permitted when stream is capturing$"):
        record(pool, RuntimeError(WAITS))
    assert tidy(cuda)
    assert cuda.released == [pool.handle]
    with pytest.raises(CaptureError, match="cannot be captured"):  # at once: nothing is begun
        record(pool)
    assert cuda.released == [pool.handle]
    record(Pool())


def test_the_traceback_of_a_failure_are_let_go(cuda: Cuda) -> None:
    """PyTorch holds on to its errors."""
    kept, states = [], []

    class States:
        pass

    def forward() -> None:
        mine = States()
        states.append(weakref.ref(mine))
        kept.append(RuntimeError(WAITS))
        raise kept[0]

    def attempt() -> None:
        with capturing(Any, Pool()):
            forward()

    cuda.fails_at_end = "CUDA error"
    with pytest.raises(CaptureError):
        attempt()
    assert states[0]() is None


@pytest.mark.parametrize("at_end", ["", "CUDA error: operation failed"])
@pytest.mark.parametrize(
    "lack", [torch.OutOfMemoryError(FULL), RuntimeError("CUDA error: out of memory")]
)
def test_no_memory_is_said_to_be_that(cuda: Cuda, lack: RuntimeError, at_end: str) -> None:
    pool, cuda.fails_at_end = Pool(), at_end
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        record(pool, lack)
    assert tidy(cuda)
    assert bool(pool.broken) == bool(at_end)  # a pool that is sound can be used again


def test_no_memory_for_the_graph_itself(cuda: Cuda) -> None:
    pool, cuda.fails_after_end = Pool(), "CUDA error: out of memory"
    with pytest.raises(torch.OutOfMemoryError):
        record(pool)
    assert tidy(cuda)
    assert not cuda.released  # that is done when the graph goes


@pytest.mark.parametrize("at_end", ["", "CUDA error: operation failed"])
def test_other_errors_pass(cuda: Cuda, at_end: str) -> None:
    cuda.fails_at_end = at_end
    with pytest.raises(KeyboardInterrupt), capturing(Any, Pool()):
        raise KeyboardInterrupt
    assert tidy(cuda)
