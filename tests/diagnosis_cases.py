"""Histories of metrics written by hand: each illness of the diagnosis, and what only looks ill."""

import random
from collections.abc import Sequence

from posttrain.track.diagnosis import Setup

SETUP = Setup(
    decides="exact",
    weights={"exact": 1.0, "format": 0.2, "watched": 0.0},
    critic_warmup=3,
    rounding=1e-3,
)


def course(**columns: Sequence[float]) -> list[dict[str, float]]:
    """Records from columns: ``rollout__length`` is rollout/length."""
    names = [name.replace("__", "/") for name in columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def level(value: float, steps: int = 12, *, spread: float = 0.0) -> list[float]:
    """A value with noise around it."""
    dice = random.Random(0)
    return [value + dice.uniform(-spread, spread) for _ in range(steps)]


def ramp(start: float, end: float, steps: int = 40, *, spread: float = 0.0) -> list[float]:
    """A straight way from one value to another, with noise around it."""
    around = level(0.0, steps, spread=spread)
    return [start + (end - start) * at / (steps - 1) + around[at] for at in range(steps)]


def part(name: str, values: Sequence[float]) -> dict[str, Sequence[float]]:
    return {f"reward/part/{name}": values}


ILL: dict[str, list[dict[str, float]]] = {
    "no_signal": course(
        rollout__groups_without_signal=level(1.0), reward__mean=level(0.0), reward__std=level(0.0)
    ),
    "entropy_collapse": course(
        objective__entropy=[*level(0.8, 10), *level(0.02, 8)],
        **part("exact", level(0.3, 18)),
    ),
    "kl_blow_up": course(
        objective__kl=[*ramp(0.0, 2.0, 15), *ramp(8.0, 12.0, 5)], rollout__length=level(20.0, 20)
    ),
    "clip_fraction_near_one": course(policy__clip_fraction=level(0.8, spread=0.1)),
    "length_explosion": course(
        rollout__length=ramp(20.0, 70.0, spread=2.0), **part("exact", level(0.3, 40, spread=0.02))
    ),
    "all_truncated": course(rollout__truncated=level(0.97, spread=0.03)),
    "format_learned_accuracy_flat": course(
        **part("exact", level(0.02, 40, spread=0.02)),
        **part("format", [*ramp(0.1, 0.95, 15), *level(0.95, 25)]),
    ),
    "hacking": course(
        reward__mean=ramp(0.2, 0.9, spread=0.05),
        **part("watched", [*ramp(0.3, 0.6, 15), *ramp(0.6, 0.1, 25, spread=0.05)]),
    ),
    "grader_failing": course(reward__invalid=level(0.03, spread=0.02)),
    "steps_skipped": course(train__skipped=[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
    "critic_worse_than_mean": course(
        value__explained_variance=level(-0.4, 30, spread=0.3), reward__std=level(0.4, 30)
    ),
    "drift": course(mismatch__mean=level(0.02, spread=0.005)),
}

HEALTHY: dict[str, list[dict[str, float]]] = {
    "a step that was skipped": course(train__skipped=[*level(0.0, 8), 1.0, *level(0.0, 8)]),
    "groups that mostly agree": course(
        rollout__groups_without_signal=level(0.9, 60, spread=0.09), reward__mean=level(0.9, 60)
    ),
    "single completions that differ": course(reward__mean=level(0.0), reward__std=level(0.01)),
    "a solved task is decided": course(
        objective__entropy=ramp(0.8, 0.01, 60), **part("exact", ramp(0.2, 0.97, 60))
    ),
    "a slow loss of entropy": course(objective__entropy=ramp(0.8, 0.15, 200, spread=0.05)),
    "a divergence that grows steadily": course(
        objective__kl=ramp(0.0, 12.0, 100, spread=0.5), rollout__length=level(20.0, 100)
    ),
    "the first steps away from the reference": course(
        objective__kl=[0.0, 0.01, 0.1, 0.5, 1.5, 2.5, 3.0, 3.2], rollout__length=level(20.0, 8)
    ),
    "clipping as usual": course(policy__clip_fraction=level(0.25, 60, spread=0.15)),
    "longer and better": course(
        rollout__length=ramp(100.0, 300.0), **part("exact", ramp(0.2, 0.6))
    ),
    "lengths that come and go": course(
        rollout__length=level(20.0, 200, spread=10.0), **part("exact", level(0.3, 200))
    ),
    "half is cut": course(rollout__truncated=level(0.5, 60, spread=0.4)),
    "format first, then accuracy": course(
        **part("exact", [*level(0.02, 15), *ramp(0.05, 0.6, 45)]),
        **part("format", [*ramp(0.1, 0.95, 15), *level(0.95, 45)]),
    ),
    "reward and truth rise together": course(
        reward__mean=ramp(0.2, 0.9, 200, spread=0.1),
        **part("watched", ramp(0.1, 0.5, 200, spread=0.2)),
    ),
    "a noisy truth": course(
        reward__mean=ramp(0.2, 0.9, 200, spread=0.1), **part("watched", level(0.3, 200, spread=0.2))
    ),
    "a grader that failed once": course(reward__invalid=[*level(0.0), 0.2, *level(0.0)]),
    "a critic that sometimes fails": course(
        value__explained_variance=level(0.2, 200, spread=0.4), reward__std=level(0.4, 200)
    ),
    "nothing to explain": course(
        value__explained_variance=level(-5.0, 40),
        reward__std=level(0.0, 40),
        rollout__groups_without_signal=level(0.5, 40),
    ),
    "rounding": course(mismatch__mean=level(1e-4, 60, spread=1e-4)),
}


def healthy(name: str) -> dict[str, float]:
    """A healthy value of each metric that the history of an illness has."""
    good = {
        "rollout/groups_without_signal": 0.2,
        "reward/mean": 0.5,
        "reward/std": 0.4,
        "objective/entropy": 0.8,
        "objective/kl": 1.0,
        "policy/clip_fraction": 0.1,
        "rollout/length": 20.0,
        "rollout/truncated": 0.0,
        "reward/part/exact": 0.3,
        "reward/part/format": 0.1,
        "reward/part/watched": 0.6,
        "reward/invalid": 0.0,
        "train/skipped": 0.0,
        "value/explained_variance": 0.5,
        "mismatch/mean": 1e-4,
    }
    return {metric: good[metric] for metric in ILL[name][0]}
