"""Reinforcement-learning post-training of language models: right, fast, readable.

``posttrain.sft``, ``prefer``, ``reward``, ``rl``, ``evaluate`` and ``generate`` do whole jobs;
``posttrain.algorithms`` is the mathematics. Importing this needs torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.types import Batch, Completion, Prompt, Rollout, Sampling, Score, Terms

if TYPE_CHECKING:
    from posttrain.build.api import evaluate, generate, prefer, reward, rl, sft
    from posttrain.build.results import Run

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Completion",
    "Prompt",
    "Rollout",
    "Run",
    "Sampling",
    "Score",
    "Terms",
    "__version__",
    "evaluate",
    "generate",
    "prefer",
    "reward",
    "rl",
    "sft",
]

_JOBS = ("evaluate", "generate", "prefer", "reward", "rl", "sft")


def __getattr__(name: str) -> Any:
    """The jobs load what they need when they are first asked for."""
    if name in _JOBS:
        from posttrain.build import api

        return getattr(api, name)
    if name == "Run":
        from posttrain.build.results import Run

        return Run
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
