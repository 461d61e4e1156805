"""Bringing tensors to a device without a wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. A GPU fetches it when it comes to that; the caller goes on.

    A plain copy of more than a few kilobytes would wait until the GPU has done all that was asked
    of it before; one from page-locked memory does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
