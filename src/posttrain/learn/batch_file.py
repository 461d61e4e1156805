"""Saves a batch to a file and loads it again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.types import Batch


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """The fields that the batch has, by name."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def write_batch(path: str | Path, batch: Batch) -> None:
    """Write every field of a batch as safetensors."""
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
        for name, tensor in batch_tensors(batch).items()
    }
    save_file(tensors, path)


def read_batch(path: str | Path) -> Batch:
    """The batch that :func:`write_batch` wrote.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "batch.safetensors"
    >>> write_batch(path, Batch.from_rewards([1.0, 0.0]))
    >>> read_batch(path).rewards
    tensor([1., 0.], dtype=torch.float64)
    """
    return Batch(**load_file(path))
