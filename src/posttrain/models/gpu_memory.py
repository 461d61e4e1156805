"""What a GPU has left."""

from __future__ import annotations

import torch


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
