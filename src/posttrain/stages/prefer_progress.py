"""How far the stage ``prefer`` has come: to a checkpoint and back, exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.preference_sets import Ranked
from posttrain.pipelines.annotate import Annotated
from posttrain.protocols import Split
from posttrain.runs import read_json
from posttrain.runs.checkpoints import Checkpoint

ANNOTATED = "annotated.json"


@dataclass(kw_only=True)
class SplitProgress:
    """What is done of one split: the preferences, and the draws of the annotator's errors."""

    generator: random.Random
    done: int = 0
    found: Annotated = field(default_factory=Annotated)

    @classmethod
    def new(cls, seed: str) -> SplitProgress:
        """Nothing is done yet."""
        return cls(generator=random.Random(seed))

    def add(self, more: Annotated) -> None:
        """One more part of the work is done."""
        self.done, self.found = self.done + 1, self.found + more

    def plain(self) -> dict[str, Any]:
        """The same in JSON."""
        found = {**vars(self.found), "sets": list(map(_plain, self.found.sets))}
        return {"done": self.done, "found": found, "generator": self.generator.getstate()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> SplitProgress:
        """What :meth:`plain` gave."""
        version, numbers, spare = plain["generator"]
        generator = random.Random()
        generator.setstate((version, tuple(numbers), spare))
        sets = [_ranked(row) for row in plain["found"]["sets"]]
        found = Annotated(**{**plain["found"], "sets": sets})
        return cls(generator=generator, done=plain["done"], found=found)


def keep(progress: Mapping[Split, SplitProgress], folder: Path) -> dict[str, Any]:
    """Write what is done into a checkpoint."""
    plain = {split: part.plain() for split, part in progress.items()}
    # In ASCII: a completion may hold half a character, which UTF-8 cannot.
    (folder / ANNOTATED).write_text(json.dumps(plain), encoding="ascii")
    return {}


def restore(begins_at: Checkpoint | None) -> dict[Split, SplitProgress]:
    """What was done when a checkpoint was written; nothing without one."""
    if begins_at is None:
        return {}
    return {
        split: SplitProgress.read(part)
        for split, part in read_json(begins_at.path / ANNOTATED).items()
    }


def _plain(ranked: Ranked) -> dict[str, Any]:
    return {**vars(ranked), "messages": [dict(message) for message in ranked.messages]}


def _ranked(row: Mapping[str, Any]) -> Ranked:
    return Ranked(
        prompt=row["prompt"],
        messages=tuple(row["messages"]),
        completions=tuple(row["completions"]),
        margin=row["margin"],
    )
