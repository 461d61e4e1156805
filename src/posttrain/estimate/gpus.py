"""GPUs by name, as their data sheets have them, this machine, and the time of a step on each.

That time is counted bytes and operations at a share of what the device can do.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from posttrain.estimate.parts import make_model
from posttrain.estimate.work import Work
from posttrain.models.adapters import adapted_layers
from posttrain.models.files.size import machine_memory
from posttrain.models.gpu_memory import parse_size
from posttrain.models.roofline import Peak, Shape, average, decode_step, learning_flops
from posttrain.registry import did_you_mean


class Device(NamedTuple):
    """Memory in bytes, bytes and dense bfloat16 operations a second, and where that is from."""

    name: str
    memory: float
    bytes_per_second: float
    flops_per_second: float
    kind: Literal["cuda", "cpu"] = "cuda"
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
        if not (memory := parse_size(asked)):
            raise ValueError(asked)
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


# Shares of the peak that a SmolLM2-135M reached on an H200 (docs/benchmarks.md): of the bytes while
# sampling, of the operations while learning. Larger models reach more.
SAMPLING = {False: 0.12, True: 0.23}  # by whether layers are compiled
LEARNING = {False: 0.075, True: 0.22}
ON_CPU = 0.5  # of rates that are a guess


def shares(work: Work) -> tuple[float, float]:
    """The shares of the device's bytes and operations a second that are reckoned with."""
    if work.device == "cpu":
        return ON_CPU, ON_CPU
    return SAMPLING[work.compiled], LEARNING[work.compiled]


def step_seconds(work: Work, device: Device) -> dict[str, float]:
    """Seconds of sampling and of learning, all completions as long as they may be."""
    model = make_model(work)
    shape = Shape.of(model)
    peak = Peak(
        bytes_per_second=device.bytes_per_second,
        flops_per_second=device.flops_per_second,
        source=device.source,
    )
    found, (moving, computing) = {}, shares(work)
    if work.samples_here:
        mean = average([work.prompt_tokens] * work.sequences, [work.new_tokens] * work.sequences)
        item = work.compute.itemsize
        step = decode_step(shape, rows=mean.rows, length=mean.length, item_bytes=item)
        found["sampling"] = mean.steps * step.seconds(peak) / moving
    rate = computing * device.flops_per_second
    found["learning"] = _operations(work, model, shape=shape) / rate
    return found


def _operations(work: Work, model: Any, *, shape: Shape) -> float:
    """Forward and backward, twice with a critic of its own; and a forward of each that is asked.

    Of frozen weights no gradient is computed, which is a third of the work.
    """
    p, n = work.prompt_tokens, work.new_tokens - 1
    each = learning_flops(
        shape,
        read=work.prompts * (p + work.group * n),
        chosen=work.sequences * work.new_tokens,
        pairs=work.prompts * (p * (p + 1) / 2 + work.group * (p * n + n * (n + 1) / 2)),
    )
    whole = sum(each.values())
    factor = 2 / 3 if adapted_layers(model) else 1.0
    factor += 1 / 3 if work.checkpointed else 0.0
    trunks = 1 + (work.critic == "separate")
    asked = (work.reference is not None) + (work.teacher is not None)
    asked += trunks if work.critic or work.epochs * work.minibatches > 1 else 0
    return whole * (work.epochs * trunks * factor + asked / 3)
