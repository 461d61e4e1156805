"""Recording what a GPU does in a CUDA graph, and going on unharmed where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RecordingError(RuntimeError):
    """What was to be recorded needs the host in its midst: it looks at what the GPU computes."""


class Pool:
    """Memory that graphs have in common, so that no two of them may run at the same time.

    ``broken`` says why recording in it has failed; nothing more is recorded in it then.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.broken = ""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Pool) -> Iterator[None]:
    """Inside, kernels are recorded in ``graph`` and not run; other threads may use the device.

    Where that fails, by :class:`RecordingError` or for want of memory, all is as it was before.
    """
    if pool.broken:
        raise RecordingError(pool.broken)
    lack = ""  # of memory
    with torch.cuda.stream(torch.cuda.current_stream()):  # a failure leaves another one current
        try:
            with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
                try:
                    yield
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        lack = str(error)
                    pool.broken = _explain(error)
                    error.__traceback__ = None  # PyTorch never lets go of it, nor of its frames
        except RuntimeError as error:
            pool.broken = pool.broken or _explain(error)
            _recover(pool)
    if lack:
        raise torch.OutOfMemoryError(lack)
    if pool.broken:
        raise RecordingError(pool.broken)


def _explain(error: RuntimeError) -> str:
    reason = str(error).splitlines()[0]
    return f"this model cannot be recorded, so all its kernels are launched anew: {reason}"


def _recover(pool: Pool) -> None:
    """Tell PyTorch that a recording has ended, as it does itself unless one breaks.

    The memory of the pool is given back, and random numbers, which are refused while something is
    recorded, are to be had again once another recording has ended well.
    """
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, pool.handle)
    torch._C._cuda_releasePool(device, pool.handle)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
