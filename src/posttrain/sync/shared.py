"""Nothing to send: the engine samples from the learner's own module."""

from __future__ import annotations

from posttrain.protocols import Engine


class SharedWeights:
    """Marks the engine's policy as new; learner and engine hold the same tensors."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, version: int) -> None:
        """The engine's next completions carry this version."""
        self._engine.version = version
