"""The weights of a stage at its lowest held-out loss, kept while it trains on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.learn.checkpoint import load_weights, save_weights, swap_weights, weights_of
from posttrain.protocols import Learner

FILE = "best.safetensors"


class Best:
    """Remembers the step and the loss of the best evaluation so far, and a copy of its weights.

    The copy is in main memory, and written only into checkpoints: at the end the weights are
    asked for once, if they are not the last ones anyway. Of equal losses the first is the best.
    """

    def __init__(self, learner: Learner, *, last_step: int) -> None:
        self._learner, self._last_step = learner, last_step
        self._best: tuple[int, float] | None = None
        self._seen: tuple[int, float] | None = None
        self._weights: dict[str, Tensor] | None = None

    def saw(self, step: int, loss: float) -> None:
        """An evaluation of the weights after a step."""
        self._seen = (step, loss)
        if math.isfinite(loss) and (self._best is None or loss < self._best[1]):
            self._best = (step, loss)
            self._weights = None  # the older copy goes before the new one comes
            self._weights = None if step == self._last_step else weights_of(self._learner)

    @property
    def steps_since(self) -> int:
        """Steps from the best evaluation to the last one."""
        if self._best is None or self._seen is None:
            return 0
        return self._seen[0] - self._best[0]

    @property
    def is_lost(self) -> bool:
        """Whether the weights that the learner ends with are not the best ones."""
        return self._weights is not None

    def exchange(self) -> None:
        """Give the learner the best weights, where it has others, or back those it had."""
        if self._weights is not None:
            swap_weights(self._learner, self._weights)

    def record(self) -> dict[str, Any]:
        """The best evaluation and the last one."""
        seen = {"best": self._best, "last": self._seen}
        return {
            name: {"step": known[0], "test_loss": known[1]}
            for name, known in seen.items()
            if known is not None
        }

    def keep(self, folder: Path) -> dict[str, Any]:
        """Write into a checkpoint what goes on from there: ``more`` of ``Keeper.stepped``."""
        if self._weights is not None:
            save_weights(self._weights, folder / FILE)
        return {"held_out": self.record()}

    def restore(self, folder: Path, known: Mapping[str, Any], *, step: int) -> None:
        """Go on from a checkpoint after a step, with a learner that was restored from it."""
        self._best, self._seen = (
            (int(known[name]["step"]), float(known[name]["test_loss"])) if name in known else None
            for name in ("best", "last")
        )
        if (folder / FILE).exists():
            self._weights = load_weights(self._learner, folder / FILE)
        elif self._best is not None and step != self._last_step:
            self._weights = weights_of(self._learner)  # it was to be the end, and is no longer
