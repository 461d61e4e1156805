"""What a GPU has left, and what it looks like when memory is used up."""

from __future__ import annotations

import re
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

_UNITS = {"G": 2**30, "M": 2**20}
_limits: dict[int, int] = {}  # bytes that this process may take, by the number of the GPU

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


def parse_size(text: str) -> int:
    """Bytes of "8GB" or "512 MiB"; a GB is 2**30 bytes, as memory is made and sold.

    >>> parse_size("8GB") == parse_size("8 GiB") == 8 * 2**30
    True
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not an amount of memory; write 8GB or 512MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def limit_memory(device: torch.device | str, num_bytes: int) -> None:
    """Have PyTorch take no more than this of a GPU, and all that asks what is free know it."""
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), _number(device))
    _limits[_number(device)] = num_bytes


def free_bytes(device: torch.device | str) -> int:
    """Bytes of a GPU that nobody uses: what the driver has, and what PyTorch keeps in reserve.

    With a limit (:func:`limit_memory`), at most what is left of that.
    """
    free, _ = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device)
    if (limit := _limits.get(_number(device))) is not None:
        free = max(0, min(free, limit - taken))
    return free + taken - torch.cuda.memory_allocated(device) - captured_bytes(device)


def whole_bytes(device: torch.device | str) -> int:
    """Bytes of a GPU that this process may take, whoever has them now."""
    share = torch.cuda.memory.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


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
    number = _number(device)
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == number and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _number(device: torch.device | str) -> int:
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index
