"""How a learner computes, in words: packed or padded, captured or not, on how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.models.cache import context_length
from posttrain.types.ways import Support, Way

if TYPE_CHECKING:
    import torch

    from posttrain.fast.score import CapturedPasses

WITHOUT_PACKING = "padding is computed, and a prompt again for each of its completions"
SHARDED = "the weights are sharded over ranks"


def learning_way(
    packed: Support,
    *,
    captured: Sequence[CapturedPasses],
    ranks: int,
    replicas: int | None,
    device: torch.device,
) -> Way:
    """The way of a learner that packs, or says why not, with its captured passes."""
    spread = (f"sharded over {ranks} ranks",) if ranks > 1 else ()
    if replicas:
        spread = (f"{replicas} replicas at once",)
    if not packed:
        return Way.of("padded rows", *spread, wanted=[("packing", packed, WITHOUT_PACKING)])
    wanted = []
    if ranks > 1 and device.type == "cuda":
        wanted = [("captured passes", Support(SHARDED), "each pass takes longer")]
    elif captured:
        broken = next((one.pool.broken for one in captured if one.pool.broken), "")
        wanted = [("captured passes", Support(broken), "each pass takes longer")]
    when = "" if device.type == "cuda" else " where it saves work"
    return Way.of(f"packed sequences{when}", "shared prompts", *spread, wanted=wanted)


def check_room(teacher: Any, longest: int) -> None:
    """Raise where sequences are longer than what a teacher can read, if there is one."""
    room = None if teacher is None else context_length(teacher)
    if room is not None and room < longest:
        raise ValueError(
            f"teacher.model: its context has {room} tokens, and sequences may have up to "
            f"{longest}; take a teacher with a longer one, or lower rl.max_new_tokens"
        )


def check_compared(divergence: object | None, teacher: object | None) -> None:
    """Raise where a loss compares distributions, and there is no whole teacher to compare with."""
    if divergence is not None and teacher is None:
        raise ValueError(
            "rl.loss: it compares distributions with a teacher's, and needs one on one rank: "
            "set teacher.model and cluster.learners = 1"
        )
