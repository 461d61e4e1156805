"""What the evaluations at both ends of a run found, as a person reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.runs.files import SEAL, check_seal, read_json, write_sealed
from posttrain.runs.folder import RunFolder, StageFolder
from posttrain.types.marks import estimate_label, how_to_declare, no_full_marks, reward_label

BEFORE, BEFORE_PROBLEMS = "before.json", "before.jsonl"
_PROBLEMS = "problems_sha256"


class Interval(NamedTuple):
    """A measured value and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of held-out answers before and after; ``note`` says why there is none."""

    label: str
    before: Interval | None = None
    after: Interval | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Both evaluations, as the stages have recorded them; {} where there is none.

    ``accuracy_by`` is the reward that checks answers, "" where none does; ``weights`` are those of
    all rewards.
    """

    accuracy_by: str = ""
    weights: Mapping[str, float]
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def exists(self) -> bool:
        """Whether there is any."""
        return bool(self.before or self.after)

    @property
    def above_one(self) -> dict[str, float]:
        """Rewards that gave more than 1 and declare no maximum, with the largest score seen."""
        seen = [found.get("above_one", {}) for found in (self.before, self.after)]
        names = sorted({name for each in seen for name in each})
        return {name: max(each[name] for each in seen if name in each) for name in names}

    def estimates(self, when: str) -> dict[str, Any]:
        """What the one ``before`` or ``after`` estimates, less what rests on unknown full marks."""
        found = (self.before if when == "before" else self.after).get("estimates", {})
        if self.accuracy_by in self.above_one:
            return {}
        ends = tuple(f"/{name}" for name in self.above_one)
        return {name: estimate for name, estimate in found.items() if not name.endswith(ends)}

    def shares(self) -> dict[str, Share]:
        """The accuracy; without a check of answers, the share with full marks of each reward."""
        unknown = {
            "accuracy" if name == self.accuracy_by else f"full_marks/{name}": largest
            for name, largest in self.above_one.items()
        }
        both = [self.estimates("before"), self.estimates("after")]
        names = sorted({*unknown, *(name for each in both for name in each if "@" not in name)})
        shares = {}
        for name in names:
            label = estimate_label(name, self.accuracy_by)
            label = f"held-out {label}" if name == "accuracy" else label
            if name in unknown:
                shares[name] = Share(label=label, note=no_full_marks(unknown[name]))
            else:
                before, after = (Interval(**each[name]) if name in each else None for each in both)
                shares[name] = Share(label=label, before=before, after=after)
        return shares

    def means(self) -> dict[str, tuple[float | None, float | None]]:
        """The mean of every reward before and after; first that of their sum, where it is one."""
        both = [found.get("parts", {}) for found in (self.before, self.after)]
        rows: dict[str, tuple[float | None, float | None]] = {}
        counting = [weight for weight in self.weights.values() if weight]
        if self.exists and counting != [1.0]:
            rows["held-out reward, weighted sum"] = (
                self.before.get("reward"),
                self.after.get("reward"),
            )
        for name in dict.fromkeys([*both[0], *both[1]]):
            label = f"held-out {reward_label(name, self.weights)}"
            rows[label] = (both[0].get(name), both[1].get(name))
        return rows

    def notes(self) -> list[str]:
        """What has to be said of these numbers."""
        notes = [how_to_declare(name, largest) for name, largest in self.above_one.items()]
        if self.exists and not self.accuracy_by:
            notes.append(
                "no accuracy: nothing here checks answers; task.accuracy names a reward that does"
            )
        return notes


def held_out(run: RunFolder) -> HeldOut:
    """The evaluation at the end of a run, and the one before RL where it asked the same."""
    before = dict((run.stage_record("rl") or {}).get("before", {}))
    after = dict((run.stage_record("eval") or {}).get("after", {}))
    if after and before.get("of") != after.get("of"):
        before = {}
    stage = run.stage("eval" if after else "rl")
    return HeldOut(accuracy_by=stage.accuracy_by, weights=stage.weights, before=before, after=after)


def write_before(stage: StageFolder, found: Mapping[str, Any]) -> None:
    """Keep what the evaluation before a stage found; its problems are written already."""
    write_sealed(stage.path / BEFORE, {**found, _PROBLEMS: _digest(stage)})


def read_before(stage: StageFolder) -> dict[str, Any] | None:
    """What :func:`write_before` kept, or None; an error where that or the problems have changed."""
    path = stage.path / BEFORE
    if not path.exists():
        return None
    found = dict(read_json(path))
    check_seal(found, path)
    if found.pop(_PROBLEMS) != _digest(stage):
        raise ValueError(
            f"{stage.path / BEFORE_PROBLEMS}: has changed since it was written, or is gone; put it "
            f"back as it was, or remove {path}: a run that is resumed evaluates again"
        )
    del found[SEAL]
    return found


def _digest(stage: StageFolder) -> str:
    path = stage.path / BEFORE_PROBLEMS
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()
