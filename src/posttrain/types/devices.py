"""Copying tensors to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; the copy to a GPU is asynchronous.

    A plain copy of more than a few kilobytes would wait for all kernels queued before it; one from
    pinned memory does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
