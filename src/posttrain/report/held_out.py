"""The evaluations before and after a run, with labels for readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.runs.folder import RunFolder
from posttrain.types.marks import estimate_label, how_to_declare, no_full_marks, reward_label

Change = tuple[float | None, float | None]
"""A number before and after."""


class Interval(NamedTuple):
    """A measured value and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of held-out answers before and after; ``note`` says why it is missing."""

    label: str
    before: Interval | None = None
    after: Interval | None = None
    note: str = ""

    @property
    def values(self) -> Change:
        """Before and after, without the bounds."""
        return self.before and self.before.value, self.after and self.after.value


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
    def both(self) -> dict[str, Mapping[str, Any]]:
        """The evaluations that exist, by ``before`` and ``after``."""
        found = {"before": self.before, "after": self.after}
        return {when: numbers for when, numbers in found.items() if numbers}

    @property
    def above_one(self) -> dict[str, float]:
        """Rewards that gave more than 1 and declare no maximum, with the largest score seen."""
        seen = [numbers.get("above_one", {}) for numbers in self.both.values()]
        names = sorted({name for each in seen for name in each})
        return {name: max(each[name] for each in seen if name in each) for name in names}

    @property
    def checked(self) -> bool:
        """Whether each answer is known to be right or wrong."""
        return bool(self.accuracy_by) and self.accuracy_by not in self.above_one

    def estimates(self, when: str) -> dict[str, Any]:
        """The estimates ``before`` or ``after``, without those whose full marks are unknown."""
        found = self.both.get(when, {}).get("estimates", {})
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

    def means(self) -> dict[str, Change]:
        """The mean of every reward before and after; first that of their weighted sum."""
        before, after = self.before.get("parts", {}), self.after.get("parts", {})
        rows: dict[str, Change] = {}
        if self.both and [weight for weight in self.weights.values() if weight] != [1.0]:
            sums = self.before.get("reward"), self.after.get("reward")
            rows["held-out reward, weighted sum"] = sums
        for name in before | after:
            label = f"held-out {reward_label(name, self.weights)}"
            rows[label] = (before.get(name), after.get(name))
        return rows

    def notes(self, *, key: str = "task.accuracy") -> list[str]:
        """Remarks on these numbers; ``key`` is the setting that names the check of answers."""
        notes = [how_to_declare(name, largest) for name, largest in self.above_one.items()]
        if self.both and not self.accuracy_by:
            notes.append(
                f"no accuracy: nothing here checks answers; {key} names a reward that does"
            )
        return notes

    def broken(self) -> str:
        """The shares of broken held-out scores and the first reason, or nothing where none broke.

        >>> after = {"invalid": 0.25, "reason": "no answer"}
        >>> HeldOut(weights={}, before={"invalid": 0.0}, after=after).broken()
        'before 0%, after 25% (first: no answer)'
        """
        reasons = [one.get("reason", "") for one in self.both.values() if one["invalid"]]
        if not reasons:
            return ""
        shares = {when: f"{100 * one['invalid']:.3g}%" for when, one in self.both.items()}
        alike = set(shares.values())
        texts = [f"{when} {share}" for when, share in shares.items()]
        return f"{alike.pop() if len(alike) == 1 else ', '.join(texts)} (first: {reasons[0]})"

    def summary(self) -> dict[str, Any]:
        """The evaluations for ``summary.json``: shares, every reward, broken scores."""
        if not self.both:
            return {}
        numbers: dict[str, Any] = {"accuracy_by": self.accuracy_by, "above_one": self.above_one}
        rewards: dict[str, dict[str, float]] = {n: {"weight": w} for n, w in self.weights.items()}
        full: dict[str, dict[str, float]] = {}
        for when, found in self.both.items():
            known = {
                name: interval.value
                for name, share in self.shares().items()
                if (interval := getattr(share, when)) is not None
            }
            if "accuracy" in known:
                numbers[f"accuracy_{when}"] = known.pop("accuracy")
            for name, value in known.items():
                full.setdefault(name.removeprefix("full_marks/"), {})[when] = value
            for name, value in found["parts"].items():
                rewards.setdefault(name, {})[when] = value
            numbers |= {when: self.estimates(when), f"mean_reward_{when}": found["reward"]}
            numbers[f"invalid_{when}"] = found["invalid"]
            numbers["problems"] = found.get("problems")  # older versions did not record it
            if found["invalid"]:
                numbers.setdefault("invalid_reason", found.get("reason", ""))
        return {**numbers, **({"full_marks": full} if full else {}), "rewards": rewards}


def held_out(run: RunFolder) -> HeldOut:
    """The evaluation at the end of a run, and the one before RL if it used the same problems."""
    before = dict((run.stage_record("rl") or {}).get("before", {}))
    after = dict((run.stage_record("eval") or {}).get("after", {}))
    if after and before.get("of") != after.get("of"):
        before = {}
    stage = run.stage("eval" if after else "rl")
    return HeldOut(accuracy_by=stage.accuracy_by, weights=stage.weights, before=before, after=after)
