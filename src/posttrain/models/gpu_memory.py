"""What a GPU has left, and what it looks like when memory is used up."""

from __future__ import annotations

import torch

OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)
# What is raised as a plain RuntimeError: by a CPU, by libraries on a GPU, by its driver.
_MESSAGES = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)


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
    return free + reserved - recorded_bytes(device)


def recorded_bytes(device: torch.device | str) -> int:
    """Bytes that recordings (CUDA graphs) keep: PyTorch counts them as free, but to no one else."""
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == number and tuple(segment["segment_pool_id"]) != (0, 0)
    )
