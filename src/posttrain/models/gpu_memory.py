"""What a GPU has left, and what it looks like when memory is used up."""

from __future__ import annotations

import threading

import torch

OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)
# What is raised as a plain RuntimeError: by a CPU, by libraries on a GPU, by its driver.
_MESSAGES = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)

CPU_BYTES = 4 << 30  # what decoding may take where free memory cannot be asked for

# Held by a thread that captures a CUDA graph, and by one that does what breaks such a capture:
# waiting for the whole device, as compilers do that measure kernels, or emptying its cache.
capture_lock = threading.RLock()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory is used up.

    >>> ran_out(torch.OutOfMemoryError("CUDA out of memory.")), ran_out(RuntimeError("shape"))
    (True, False)
    """
    if isinstance(error, OUT_OF_MEMORY):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def free_bytes(device: torch.device | str) -> int:
    """Bytes of a GPU that nobody uses: what the driver has, and what PyTorch keeps in reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + reserved - captured_bytes(device)


def memory_budget(device: torch.device) -> int:
    """Bytes that decoding may take: half of what a GPU has left, 4 GiB elsewhere."""
    if device.type != "cuda":
        return CPU_BYTES
    return free_bytes(device) // 2


def empty_cache() -> None:
    """Give memory that PyTorch only keeps in reserve back to the GPU."""
    with capture_lock:
        torch.cuda.empty_cache()


def captured_bytes(device: torch.device | str) -> int:
    """Bytes that CUDA graphs keep for themselves, although PyTorch counts them as free."""
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == number and tuple(segment["segment_pool_id"]) != (0, 0)
    )
