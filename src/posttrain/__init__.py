"""Reinforcement-learning post-training of language models: right, fast, readable.

``posttrain.sft``, ``prefer``, ``reward``, ``rl``, ``evaluate``, ``generate`` and ``play`` do whole
jobs; ``posttrain.algorithms`` is the mathematics. Importing this loads nothing, torch included,
until something needs it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP reads these when torch loads it. Idle OpenMP threads that spin take a core from busy ones:
# beside another busy process a small model is then several times as slow. Threads that sleep at
# once cost more to wake than a small product takes, so GNU's wait awake for a few microseconds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# oneDNN, and what calls it in PyTorch, keep what they prepare for each shape of a product, by
# default of 1,024 shapes: batches of ever other lengths would fill gigabytes.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "64")

if TYPE_CHECKING:
    from posttrain.api import (
        Callback,
        Policy,
        Run,
        StepDone,
        Stop,
        dpo,
        evaluate,
        generate,
        play,
        prefer,
        push,
        reward,
        rl,
        sft,
    )
    from posttrain.types import Batch, Prompt, Rollout, Sampling, Score, Terms, Turn

__version__ = "0.1.0"  # the only place with the version: pyproject.toml reads it from here

__all__ = [
    "Batch",
    "Callback",
    "Policy",
    "Prompt",
    "Rollout",
    "Run",
    "Sampling",
    "Score",
    "StepDone",
    "Stop",
    "Terms",
    "Turn",
    "__version__",
    "dpo",
    "evaluate",
    "generate",
    "play",
    "prefer",
    "push",
    "reward",
    "rl",
    "sft",
]

_TYPES = ("Batch", "Prompt", "Rollout", "Sampling", "Score", "Terms", "Turn")


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _TYPES:
        from posttrain import types

        return getattr(types, name)
    if name in __all__:
        from posttrain import api

        return getattr(api, name)
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
