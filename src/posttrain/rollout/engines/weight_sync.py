"""How new weights get to an engine in this process: it has the learner's own, or a copy of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.protocols import Engine

Weights = Mapping[str, Tensor]


class SharedWeights:
    """Nothing to send, the engine samples from the learner's own: its policy is marked as new."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, version: int) -> None:
        """The engine's next completions carry this version."""
        self._engine.version = version


class CopiedWeights:
    """Copies the weights of ``source`` into those of ``target``, which the engine samples from.

    In place: whatever the engine has made of its weights' addresses stays right. Call it between
    two generations. Buffers are not copied, because nothing trains them.
    """

    def __init__(self, engine: Engine, *, source: Weights, target: Weights) -> None:
        self._engine = engine
        shapes = {name: weight.shape for name, weight in source.items()}
        if shapes != {name: weight.shape for name, weight in target.items()}:
            raise ValueError("sync: the engine's model is not a copy of the one that is trained")
        # One call for all weights of a kind: a multi-tensor copy wants one type and one device.
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in target.items():
            given = source[name]
            kind = (weight.dtype, weight.device, given.dtype, given.device)
            targets, sources = groups.setdefault(kind, ([], []))
            targets.append(weight)
            sources.append(given)
        self._groups = list(groups.values())

    @torch.no_grad()
    def __call__(self, version: int) -> None:
        """The engine's next completions come from the current weights and carry this version."""
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources)
        self._engine.version = version


def share(first: Weights, second: Weights) -> bool:
    """Whether any weight of the one is kept in the memory of the other."""
    places = {weight.data_ptr() for weight in first.values()}
    return any(weight.data_ptr() in places for weight in second.values())
