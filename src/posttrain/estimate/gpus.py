"""GPUs by name, as their data sheets have them, and this machine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from posttrain.models.files.size import machine_memory
from posttrain.models.gpu_memory import parse_size
from posttrain.registry import did_you_mean


class Device(NamedTuple):
    """Memory in bytes, bytes and dense bfloat16 operations a second, and where that is from."""

    name: str
    memory: float
    bytes_per_second: float
    flops_per_second: float
    kind: str = "cuda"
    source: str = "data sheet"


def _gpu(name: str, *numbers: float) -> Device:
    gibibytes, moved, done = numbers
    return Device(name, gibibytes * 2**30, moved * 1e12, done * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("rtx-4060", 8, 0.272, 60),
        _gpu("rtx-3060", 12, 0.360, 51),
        _gpu("l4", 22.5, 0.300, 121),
        _gpu("rtx-3090", 24, 0.936, 71),
        _gpu("rtx-4090", 24, 1.008, 165),
        _gpu("rtx-5090", 32, 1.792, 209),
        _gpu("a100-40gb", 39.5, 1.555, 312),
        _gpu("l40s", 44.5, 0.864, 362),
        _gpu("a100", 79.3, 2.039, 312),
        _gpu("h100", 79.3, 3.35, 989),
        _gpu("h200", 139.8, 4.8, 989),
    )
}
CPU_RATES = (20e9, 0.1e12)  # a few cores: a guess, and said to be one


def find_device(asked: str | None) -> Device:
    """The device by its name or its memory ("8GB"); None: this machine's.

    >>> find_device("8GB").source
    'the rates of a rtx-4060 are assumed'
    """
    if asked is None:
        return _this_machine()
    name = asked.strip().lower().replace(" ", "-")
    if name in GPUS:
        return GPUS[name]
    try:
        memory = parse_size(asked)
    except ValueError:
        raise ValueError(
            f"--gpu: {asked!r} is neither an amount of memory (8GB) nor a GPU that is known; "
            f"{did_you_mean(name, GPUS)}"
        ) from None
    like = next((gpu for gpu in GPUS.values() if gpu.memory >= memory), GPUS["h200"])
    assumed = f"the rates of a {like.name} are assumed"
    return like._replace(name=f"GPU of {asked.strip()}", memory=float(memory), source=assumed)


def _this_machine() -> Device:
    if not torch.cuda.is_available():
        memory, told = float(machine_memory()), "the rates are a guess"
        return Device("this machine's CPU", memory, *CPU_RATES, kind="cpu", source=told)
    name, (_, total) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    plain = name.lower().replace(" ", "-")
    like = next((gpu for key, gpu in GPUS.items() if key in plain), None)
    assumed = like or GPUS["rtx-3090"]
    source = "data sheet" if like else f"the rates of a {assumed.name} are assumed"
    return assumed._replace(name=f"this machine's {name}", memory=float(total), source=source)
