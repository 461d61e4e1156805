"""Which options of a recipe would take less memory: each is computed, none is a saying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from posttrain.estimate.parts import CONTEXT, Footprint, footprint
from posttrain.estimate.work import Work
from posttrain.models.adapters import AdapterSettings
from posttrain.models.frozen import Reference

RANK, FEWEST_TOKENS = 16, 1024
WORTH = 0.02  # a share of the peak: less is not worth a line


class Option(NamedTuple):
    """What to write into a recipe, what it changes of the work, and the memory that this takes."""

    text: str
    changes: dict[str, Any]
    found: Footprint


def fits(found: Footprint, work: Work, *, memory: float) -> bool:
    """Whether a device with so much memory is enough, beside what its driver takes."""
    return found.peak + (CONTEXT if work.device == "cuda" else 0) <= memory


def helpful(work: Work, found: Footprint, *, memory: float) -> list[Option]:
    """The options that lower the peak, the most helpful first."""
    tried = [
        Option(text, changes, footprint(replace(work, **changes), memory))
        for text, changes in _options(work, found)
    ]
    kept = [option for option in tried if option.found.peak < (1 - WORTH) * found.peak]
    return sorted(kept, key=lambda option: option.found.peak)


def together(work: Work, options: list[Option], *, memory: float) -> list[Option]:
    """The fewest of these options, in their order, that make the work fit; none: they do not."""
    changed, taken = work, []
    for option in options:
        changed = replace(changed, **option.changes)
        taken.append(option._replace(found=footprint(changed, memory)))
        if fits(taken[-1].found, changed, memory=memory):
            return taken
    return []


def _options(work: Work, found: Footprint) -> Iterator[tuple[str, dict[str, Any]]]:
    if work.adapter is None or not work.adapter.rank:
        yield f"[adapter] rank = {RANK}", {"adapter": AdapterSettings(rank=RANK)}
        if work.moments == "full":
            yield 'rl.adam_moments = "8bit"', {"moments": "8bit"}
        reference = work.reference
        if reference is not None and not reference.offload:
            moved = Reference(dtype=reference.dtype, offload=True)
            yield "rl.kl.offload = true", {"reference": moved}
            if reference.dtype is None and work.dtype == "float32":
                half = Reference(dtype=torch.bfloat16)
                yield 'rl.kl.dtype = "bfloat16"', {"reference": half}
    if not work.checkpointed:
        yield "rl.checkpoint_activations = true", {"checkpointed": True}
    if not work.compiled and work.device == "cuda":
        yield "model.compile = true", {"compiled": True}
    if work.critic == "separate":
        yield 'rl.critic.kind = "shared"', {"critic": "shared"}
    tokens = max(work.longest, FEWEST_TOKENS)
    if tokens < min(found.micro_batch_tokens, work.tokens):
        yield f"rl.micro_batch_tokens = {tokens}", {"micro_batch_tokens": tokens}
    if found.slots > 16:
        few = max(16, found.slots // 4)
        named = f'rl.engine = {{name = "native", max_sequences = {few}}}'
        yield named, {"sequences_at_once": few}
