"""What runs in the process of one engine: it makes the engine, takes weights, decodes turns."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.distributed.wire import Packed
from posttrain.protocols import Engine, Sync
from posttrain.types import Part, Prompt, Sampling, Turn


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences to be decoded for one turn: a prompt for each, with all that was said since."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    part: Part


class EngineHost:
    """Hosts one engine of ours, whoever transports the calls; nothing of it outlives its process.

    ``make`` of :meth:`build` makes the engine here: a process that took the place of a dead one is
    built in the same way.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._received = _Received()
        self._sync: Sync | None = None

    def build(self, make: Callable[[], Engine]) -> dict[str, Any]:
        """Make the engine; what the other side wants to know of it."""
        self._engine, self._received, self._sync = make(), _Received(), None
        if "part" not in inspect.signature(self._engine.generate).parameters:
            raise ValueError(
                f"engine {type(self._engine).__name__}: its generate has no parameter part, by "
                "which several engines share a call; set cluster.engines to 0, or add it "
                "(docs/engines.md)"
            )
        way = getattr(self._engine, "way", None)
        return {"pid": os.getpid(), "way": way() if callable(way) else None}

    def load(self, version: int, weights: Mapping[str, Packed]) -> None:
        """Take these weights; the next turns carry this version."""
        self._received.take(weights)
        if self._sync is None:
            self._sync = self._built.sync(self._received)  # type: ignore[arg-type]
        self._sync(version)

    def decode(self, asked: Sequences) -> list[Turn]:
        """The next turn of each sequence, in order."""
        answers = self._built.generate(
            asked.prompts, asked.sampling, num_samples=1, seed=asked.seed, part=asked.part
        )
        return [rollout.turns[0] for (rollout,) in answers]

    def close(self) -> None:
        """Give back what the engine holds."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _built(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this engine is not built yet; call build first")
        return self._engine


class _Received:
    """The weights that came last, in the place of the learner that has trained them."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    def weights(self) -> Mapping[str, Tensor]:
        """The same tensors every time; :meth:`take` gives them other memory."""
        return self._weights

    def take(self, packed: Mapping[str, Packed]) -> None:
        """Let the tensors be those that came, without a copy."""
        for name, (array, dtype) in packed.items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                given = torch.from_numpy(array).view(getattr(torch, dtype))  # only read
            known = self._weights.setdefault(name, given)
            if known.shape != given.shape:
                raise ValueError(
                    f"weights: {name} came as {tuple(given.shape)}, and was {tuple(known.shape)}; "
                    "the model that is trained has changed"
                )
            known.data = given
