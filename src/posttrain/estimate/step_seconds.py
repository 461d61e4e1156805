"""The time of a step: counted bytes and operations at a share of what the device can do."""

from __future__ import annotations

from typing import Any

from posttrain.estimate.gpus import Device
from posttrain.estimate.parts import make_model
from posttrain.estimate.work import Work
from posttrain.models.adapters import adapted_layers
from posttrain.models.roofline import Peak, Shape, average, decode_step, learning_flops

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
