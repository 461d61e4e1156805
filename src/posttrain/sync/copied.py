"""New weights for an engine with a module of its own: copied in place, on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.protocols import Engine


class CopiedWeights:
    """Copies the weights of ``source`` into those of ``target``, which the engine samples from.

    In place: whatever the engine has made of its weights' addresses stays right. Call it between
    two generations. Buffers are not copied, because nothing trains them.
    """

    def __init__(self, engine: Engine, *, source: nn.Module, target: nn.Module) -> None:
        self._engine = engine
        theirs, ours = dict(source.named_parameters()), dict(target.named_parameters())
        shapes = {name: weight.shape for name, weight in theirs.items()}
        if shapes != {name: weight.shape for name, weight in ours.items()}:
            raise ValueError("sync: the engine's model is not a copy of the one that is trained")
        # One call for all weights of a kind: a multi-tensor copy wants one type and one device.
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in ours.items():
            given = theirs[name]
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
