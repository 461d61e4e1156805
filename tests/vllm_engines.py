"""Engines on real vLLM servers: one server for each shape of model, kept until the tests end."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.load import Policy, load_policy
from posttrain.rollout.engines import ENGINES
from posttrain.rollout.engines.vllm import PYTHON, VllmEngine
from posttrain.rollout.engines.vllm_server import Server

FAMILIES = ("llama", "gpt2")  # a server of each: seconds to start, and memory
_SERVED: dict[str, VllmEngine] = {}


def there() -> bool:
    """Whether there is an environment of vLLM's own to run tests in."""
    return bool(os.environ.get(PYTHON))


def policy_of(model: Any, end_tokens: tuple[int, ...] = ()) -> Policy:
    """A policy for an engine that is asked for tokens alone: the tokenizer is any."""
    tokenizer = load_policy("tiny").tokenizer
    return Policy(model, tokenizer, source="test", end_tokens=tuple(end_tokens), pad_token=0)


def served(model: Any) -> str:
    """The address of a server with a model of this shape."""
    if model.config.model_type not in FAMILIES:
        pytest.skip(f"vLLM is tried with {' and '.join(FAMILIES)} here")
    shape = str(sorted((k, str(v)) for k, v in model.config.to_dict().items() if "dtype" not in k))
    if shape not in _SERVED:
        engine = ENGINES["vllm"](policy_of(model), str, compute="float32")
        atexit.register(engine.close)
        _SERVED[shape] = engine  # type: ignore[assignment]
    (server,) = _SERVED[shape]._fleet.servers
    return f"127.0.0.1:{server.port}"


def engine_of(
    model: Any, *, end_tokens: Any = (3,), decode: Any = str, **options: Any
) -> VllmEngine:
    """An engine on such a server, made as the others of the contract are."""
    return VllmEngine(
        policy_of(model, end_tokens),
        [Server(served(model), deadline=120)],
        decode=decode,
        folder=Path(tempfile.mkdtemp(prefix="vllm-test-")),
        **options,
    )
