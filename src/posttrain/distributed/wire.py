"""Batches and weights on their way between processes: as numpy, which Ray reads without a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.types import Batch

Packed = tuple[np.ndarray, str]
"""The bits of a tensor, and their type in torch."""


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A batch whose fields are packed; those that it has not are not there."""

    fields: Mapping[str, Packed]


def pack_tensor(tensor: Tensor) -> Packed:
    """A tensor as numpy; bfloat16, which numpy does not know, as the bits it is made of.

    >>> array, dtype = pack_tensor(torch.ones(2, dtype=torch.bfloat16))
    >>> array.dtype.name, dtype, unpack_tensor((array, dtype))
    ('int16', 'bfloat16', tensor([1., 1.], dtype=torch.bfloat16))
    """
    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy(), str(tensor.dtype).removeprefix("torch.")


def unpack_tensor(packed: Packed) -> Tensor:
    """The tensor of :func:`pack_tensor`, in memory of its own."""
    array, dtype = packed
    return torch.from_numpy(np.array(array)).view(getattr(torch, dtype))


def pack_batch(batch: Batch, *, beside: Batch | None = None) -> PackedBatch:
    """The fields of a batch; with another batch ``beside`` it, those that are not that one's."""
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return PackedBatch(
        {
            name: pack_tensor(tensor)
            for name, tensor in tensors.items()
            if tensor is not None and (beside is None or tensor is not getattr(beside, name))
        }
    )


def unpack_batch(packed: PackedBatch, *, onto: Batch | None = None) -> Batch:
    """The batch of :func:`pack_batch`, or the batch ``onto`` with its fields added.

    >>> batch = Batch.from_rewards([1.0, 0.0])
    >>> unpack_batch(pack_batch(batch)).rewards
    tensor([1., 0.], dtype=torch.float64)
    """
    tensors: dict[str, Any] = {name: unpack_tensor(each) for name, each in packed.fields.items()}
    return Batch(**tensors) if onto is None else onto.replace(**tensors)
