"""What the benchmarks say of the least time that sampling can take: peaks of data sheets, in words.

The counting is that of :mod:`posttrain.models.roofline`. ``benchmarks/rollout.py`` shows every term
of it beside what it measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.models.roofline import (
    Average,
    DecodeStep,
    Peak,
    Shape,
    average,
    decode_step,
    learning_flops,
    measured_peak,
    synchronize,
)

__all__ = [
    "Average",
    "Peak",
    "Shape",
    "DecodeStep",
    "average",
    "decode_step",
    "explain",
    "find_peak",
    "measured_peak",
    "operations_of",
    "synchronize",
]

DATA_SHEETS = {"H200": (4.8e12, 989e12)}  # bytes/s, dense bfloat16 operations/s


def operations_of(shape: Shape, groups: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """:func:`learning_flops` of groups: the length p of a prompt, the lengths n of its completions.

    The last token of a completion is read by no layer.
    """
    read = sum(p + sum(n - 1 for n in lengths) for p, lengths in groups)
    pairs = sum(
        p * (p + 1) / 2 + sum(p * (n - 1) + (n - 1) * n / 2 for n in lengths)
        for p, lengths in groups
    )
    chosen = sum(sum(lengths) for _, lengths in groups)
    return learning_flops(shape, read=read, chosen=chosen, pairs=pairs)


def explain(work: Average, *, step: DecodeStep, peak: Peak) -> str:
    """The counting in two lines, with numbers."""
    moved, done = step.bytes / peak.bytes_per_second, step.flops / peak.flops_per_second
    return (
        f"{work.steps} steps of {work.rows:,.1f} rows, {work.length:,.1f} tokens long; "
        f"bytes: weights {step.weight_bytes:.3g} + keys and values {step.key_bytes:.3g} + logits "
        f"{step.logit_bytes:.3g} = {step.bytes:.3g}, {moved * 1e3:.3g} ms;\n"
        f"  operations: matrices {step.matrix_flops:.3g} + attention {step.attention_flops:.3g} = "
        f"{step.flops:.3g}, {done * 1e3:.3g} ms; roofline: {max(moved, done) * 1e3:.3g} ms a step "
        f"({'bytes' if moved >= done else 'operations'}), {max(moved, done) * work.steps:.3g} s"
    )


def find_peak(device: str, dtype: torch.dtype) -> Peak:
    """By the data sheet where we have one, else measured by a copy and a matrix product."""
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    for known, (moved, done) in DATA_SHEETS.items():
        if known in name and dtype == torch.bfloat16:
            return Peak(bytes_per_second=moved, flops_per_second=done, source=f"{name}, data sheet")
    return measured_peak(device, dtype)
