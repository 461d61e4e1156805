"""The description of a stage that its trackers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.types.marks import Marks


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run: ``name`` ("sft", "rl", …), where it writes, how long it will be.

    ``title`` is what a person calls it; ``config`` is its resolved section, for trackers that keep
    hyperparameters beside the curves. A resumed stage has taken ``steps_before`` steps already.
    ``marks`` says what its rewards mean, where it has any.
    """

    name: str
    folder: Path
    total_steps: int
    title: str = ""
    steps_before: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks | None = None

    def __post_init__(self) -> None:
        if self.total_steps < 0:
            raise ValueError(f"total_steps: must be at least 0, got {self.total_steps}")


@runtime_checkable
class Telling(Protocol):
    """A tracker that a person reads: it takes words beside numbers."""

    def note(self, text: str) -> None:
        """Show a note."""
        ...

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...
