"""Engines: ``ENGINES[name](policy, decode, **options)``; keyword-only parameters are options.

To add one, write the class and a function that makes it here, and name it in :data:`ENGINES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from posttrain.models.adapter_group import AdapterGroup
from posttrain.models.cache import UnknownMemoryError
from posttrain.models.load import Policy
from posttrain.models.stops import Decode
from posttrain.protocols import Engine
from posttrain.rollout.engines.joint import JointEngine
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.rollout.engines.vllm import vllm_engine

Compute = Literal["auto", "float32", "bfloat16"]


def native_engine(
    policy: Policy,
    decode: Decode,
    *,
    compute: Compute = "auto",
    max_sequences: int | None = None,
    compiled: bool = False,
) -> Engine:
    """Our own: each distinct prompt is read once, and no sequence waits for the longest.

    A model that it does not know is decoded by transformers, and the run says so in one line.
    """
    options: dict[str, Any] = {
        "end_tokens": policy.end_tokens,
        "decode": decode,
        "compute": _arithmetic(compute, policy),
        "max_sequences": max_sequences,
    }
    try:
        return NativeEngine(policy.model, compiled=compiled, **options)
    except UnknownMemoryError as reason:
        warnings.warn(f"{reason}; sampling with transformers' generate, slower", stacklevel=2)
        return TransformersEngine(policy.model, instead=f"the model has {reason.has}", **options)


def joint_engine(
    group: AdapterGroup,
    policy: Policy,
    *,
    decode: Decode,
    compute: Compute = "auto",
    max_sequences: int | None = None,
    compiled: bool = False,
) -> JointEngine:
    """The native engine for all adapters of a group, with the options of :func:`native_engine`."""
    return JointEngine(
        group,
        end_tokens=policy.end_tokens,
        decode=decode,
        compute=_arithmetic(compute, policy),
        max_sequences=max_sequences,
        compiled=compiled,
    )


def transformers_engine(
    policy: Policy, decode: Decode, *, compute: Compute = "auto", max_sequences: int | None = None
) -> TransformersEngine:
    """The ``generate`` of transformers: slower, and takes any decoder."""
    return TransformersEngine(
        policy.model,
        end_tokens=policy.end_tokens,
        decode=decode,
        compute=_arithmetic(compute, policy),
        max_sequences=max_sequences,
    )


def _arithmetic(compute: Compute, policy: Policy) -> torch.dtype | None:
    """The learner's rule: auto is bfloat16 on a GPU; else the weights are used as they are."""
    half = policy.model.device.type == "cuda" if compute == "auto" else compute == "bfloat16"
    return torch.bfloat16 if half else None


ENGINES: dict[str, Callable[..., Engine]] = {
    "native": native_engine,
    "transformers": transformers_engine,
    "vllm": vllm_engine,
}

__all__ = ["ENGINES", "NativeEngine", "ScriptedEngine", "TransformersEngine"]
