"""The data that flows through posttrain, and the index convention, stated once.

Shape legend: P prompt, G group member, B sequence (B = P·G), T token, V vocabulary.

Index convention. Every ``[B, T]`` tensor is indexed by the token it is *about*:

==================  ====================================================================
``tokens[b, t]``    the token itself
``mask[b, t]``      True where the policy chose ``tokens[b, t]`` (never rebuilt from pad ids)
``logprobs[b, t]``  log-probability of ``tokens[b, t]`` given everything before it
``values[b, t]``    the critic's view of the state in which ``tokens[b, t]`` is chosen
==================  ====================================================================

A model speaks about the *next* token; :func:`posttrain.algorithms.ops.shift` is the one place
where that is turned into the convention above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.types.text import (
    Collected,
    Observation,
    Part,
    Prompt,
    Rollout,
    Sampling,
    Score,
    ScoreState,
    StopReason,
    Turn,
    as_number,
    columns_text,
    draw_seed,
    whole,
    with_opening,
)

if TYPE_CHECKING:
    from posttrain.types.batch import Batch, Terms

__all__ = [
    "Batch",
    "Collected",
    "Observation",
    "Part",
    "Prompt",
    "Rollout",
    "Sampling",
    "Score",
    "ScoreState",
    "StopReason",
    "Terms",
    "Turn",
    "as_number",
    "columns_text",
    "draw_seed",
    "whole",
    "with_opening",
]


def __getattr__(name: str) -> Any:
    """Load torch and the types made of tensors on first use."""
    if name in ("Batch", "Terms"):
        from posttrain.types import batch

        return getattr(batch, name)
    raise AttributeError(f"module 'posttrain.types' has no attribute {name!r}")
