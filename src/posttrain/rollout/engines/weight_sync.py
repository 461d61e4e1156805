"""How new weights get to an engine in this process: it has the learner's own, or a copy of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.protocols import Engine

Weights = Mapping[str, Tensor]


class SharedWeights:
    """No copy: both hold the same tensors; only ``version`` changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, version: int) -> None:
        """The engine's next completions carry this version."""
        self._engine.version = version


class CopiedWeights:
    """Copies the weights of ``source`` into those of ``target``, which the engine samples from.

    In place, so CUDA graphs captured on these addresses stay valid. Call it between two
    generations. Weights that both share are left as they are, and buffers too: nothing trains them.
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
            if given.data_ptr() == weight.data_ptr():
                continue
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


def shares_any_storage(first: Weights, second: Weights) -> bool:
    """Whether any weight of the one is kept in the memory of the other."""
    return not _storages(first).isdisjoint(_storages(second))


def shares_all_storage(own: Weights, given: Weights) -> bool:
    """Whether every weight of ``own`` is kept in the memory of ``given``."""
    return _storages(own) <= _storages(given)


def _storages(weights: Weights) -> set[int]:
    return {weight.data_ptr() for weight in weights.values()}
