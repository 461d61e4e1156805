"""Tensors that lie over several ranks, to a folder and back, at any number of ranks.

torch.distributed.checkpoint in the format of safetensors: every rank writes a file with its shards
and where they lie in the whole. Nothing is pickled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor


def save_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors of all ranks, who all call this."""
    folder.mkdir(parents=True, exist_ok=True)
    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    checkpoint.save(dict(tensors), storage_writer=writer)


def load_shards(folder: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a folder by name: each lies as what ``like`` gives for it (None: whole).

    A tensor of another shape than that is whole too: who asked will not want it.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = {}
        for name, stored in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
                raise ValueError(f"{folder}: a part of {name!r} is missing")
            given, dtype = like(name), stored.properties.dtype
            if given is None or given.shape != stored.size:
                found[name] = torch.empty(stored.size, dtype=dtype)
            else:
                found[name] = torch.empty_like(given, dtype=dtype, requires_grad=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # it need not be
            checkpoint.load(found, storage_reader=reader)
    except (SafetensorError, checkpoint.CheckpointException) as error:
        raise ValueError(f"{folder}: is damaged ({error})") from error
    return found


def lying_as(value: Tensor, weight: Tensor) -> Tensor:
    """A whole tensor, which every rank has, as this weight lies over the ranks."""
    if isinstance(value, DTensor) or not isinstance(weight, DTensor):
        return value
    placed = value.to(weight.device)
    return distribute_tensor(placed, weight.device_mesh, weight.placements, src_data_rank=None)
