"""Histories of metrics written by hand: each illness of the diagnosis, and what only looks ill."""

import random
from collections.abc import Sequence
from dataclasses import replace

from posttrain.track.diagnosis import Background

SETUP = Background(
    decides="exact",
    weights={"exact": 1.0, "format": 0.2, "watched": 0.0},
    critic_warmup=3,
    rounding=1e-3,
)
DYNAMIC = {"rl.dynamic_sampling": True}
HELD_OUT = replace(SETUP, prompts_per_step=16, num_problems=50, stages=("sft", "rl"))
SETUPS = {
    "memorised": replace(HELD_OUT, shared_prompts=True, keys={"sft.epochs": 30}),
    "nothing_learned": HELD_OUT,
    "many_passes": replace(SETUP, prompts_per_step=4, num_prompts=4),
    "sft_memorises": Background(stage="sft", steps_per_epoch=3),
    "score_follows_length": Background(stage="reward"),
}
"""What is known where a rule needs more than ``SETUP`` says."""

# sft of a tiny model on sums of three digits, looked at now and then: 60 demonstrations, 60 times
# over (every 9 steps), and the 800 of recipes/demo.toml (every 20 steps).
FEW_TRAIN = [
    3.953,
    2.955,
    1.965,
    1.382,
    1.109,
    0.909,
    0.748,
    0.67,
    0.426,
    0.377,
    0.316,
    0.343,
    0.236,
    0.228,
    0.132,
    0.094,
    0.168,
    0.116,
    0.092,
    0.114,
]
FEW_HELD_OUT = [
    3.937,
    2.938,
    2.035,
    1.633,
    1.438,
    1.247,
    1.227,
    1.185,
    1.17,
    1.168,
    1.358,
    1.487,
    1.419,
    1.455,
    1.48,
    1.537,
    1.567,
    1.561,
    1.57,
    1.572,
]
DEMO_TRAIN = [
    2.703,
    1.349,
    1.098,
    1.031,
    1.119,
    0.981,
    0.972,
    1.009,
    0.908,
    0.929,
    0.879,
    0.929,
    0.9,
    0.844,
    0.723,
    0.78,
    0.739,
    0.855,
    0.749,
    0.765,
    0.75,
    0.737,
]
DEMO_HELD_OUT = [
    2.647,
    1.408,
    1.168,
    1.011,
    0.963,
    0.957,
    0.865,
    0.892,
    0.839,
    0.774,
    0.727,
    0.705,
    0.739,
    0.672,
    0.66,
    0.69,
    0.651,
    0.674,
    0.662,
    0.655,
    0.659,
    0.658,
]


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
        rollout__groups_without_signal=[*level(0.2, 10), *level(0.95, 8)],
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
    "memorised": course(
        reward__mean=level(0.99, 20),
        **part("exact", level(0.98, 20, spread=0.02)),
        **{"eval/part/exact": level(0.48, 20)},
    ),
    "nothing_learned": course(
        reward__mean=level(0.3, 210, spread=0.1),
        **part("exact", level(0.2, 210, spread=0.05)),
        **{"eval/accuracy": level(0.22, 210)},
    ),
    "many_passes": course(reward__mean=level(0.3, 110)),
    "sft_memorises": course(loss__total=FEW_TRAIN, test__loss=FEW_HELD_OUT),
    "score_follows_length": course(verdict__length_correlation=[-0.92], verdict__pairs=[7.0]),
}

LASTS = ("nothing_learned", "many_passes", "score_follows_length")
"""What holds to the end of a stage once it holds: it cannot come again."""

HEALTHY: dict[str, list[dict[str, float]]] = {
    "a step that was skipped": course(train__skipped=[*level(0.0, 8), 1.0, *level(0.0, 8)]),
    "groups that mostly agree": course(
        rollout__groups_without_signal=level(0.9, 60, spread=0.09), reward__mean=level(0.9, 60)
    ),
    "single completions that differ": course(reward__mean=level(0.0), reward__std=level(0.01)),
    "a solved task is decided": course(
        objective__entropy=ramp(0.8, 0.01, 60), **part("exact", ramp(0.2, 0.97, 60))
    ),
    # As SmolLM2 learns to add: the form in ten steps, the sums in the hundred after them.
    "the form is decided, the answers are not": course(
        objective__entropy=[*ramp(1.4, 0.1, 10), *level(0.02, 90)],
        rollout__groups_without_signal=[*level(0.4, 10), *ramp(0.6, 0.88, 90, spread=0.08)],
        **part("exact", [*ramp(0.02, 0.6, 10), *ramp(0.6, 0.79, 90, spread=0.05)]),
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

HEALTHY_SETUPS: dict[str, tuple[Background, list[dict[str, float]]]] = {
    "held-out problems follow": (
        HELD_OUT,
        course(**part("exact", ramp(0.3, 1.0)), **{"eval/part/exact": ramp(0.25, 0.95)}),
    ),
    "a gap that ten problems cannot show": (
        replace(HELD_OUT, num_problems=10),
        course(**part("exact", level(0.97, 20)), **{"eval/part/exact": level(0.8, 20)}),
    ),
    "held-out problems were asked before it learned": (
        HELD_OUT,
        [{"eval/part/exact": 0.3}, *course(**part("exact", ramp(0.3, 1.0)))],
    ),
    "a slow rise": (
        HELD_OUT,
        course(reward__mean=ramp(0.2, 0.3, 210, spread=0.1), **part("exact", level(0.1, 210))),
    ),
    "held-out problems alone show it": (
        HELD_OUT,
        course(reward__mean=level(0.3, 210, spread=0.1), **{"eval/accuracy": ramp(0.2, 0.5, 210)}),
    ),
    # As DAPO learns: groups that agree are dropped, so the training reward stays in the middle.
    "dynamic sampling, looked at once": (
        replace(HELD_OUT, stages=("rl",), keys=DYNAMIC),
        [
            {"eval/accuracy": 0.1, "eval/part/exact": 0.1},
            *course(reward__mean=level(0.5, 210, spread=0.1), **part("exact", level(0.5, 210))),
        ],
    ),
    "groups are drawn again": (
        replace(HELD_OUT, stages=("rl",)),
        course(reward__mean=level(0.5, 210, spread=0.1), rollout__resampled=level(30.0, 210)),
    ),
    "dynamic sampling, and held-out problems rise": (
        replace(HELD_OUT, keys=DYNAMIC),
        course(reward__mean=level(0.5, 210, spread=0.1), **{"eval/accuracy": ramp(0.2, 0.5, 210)}),
    ),
    "dynamic sampling keeps what is nearly always right, and drops what never is": (
        replace(HELD_OUT, keys=DYNAMIC),
        course(
            reward__mean=level(0.93, 30),
            rollout__groups_without_signal=level(0.0, 30),
            **part("exact", level(0.93, 30)),
            **{"eval/part/exact": level(0.5, 30)},
        ),
    ),
    "dynamic sampling, the format first and then what it does not show": (
        replace(SETUP, keys=DYNAMIC),
        course(**part("exact", level(0.5, 60)), **part("format", ramp(0.1, 1.0, 60))),
    ),
    "dynamic sampling, longer and better": (
        replace(SETUP, keys=DYNAMIC),
        course(
            rollout__length=ramp(100.0, 300.0),
            **part("exact", level(0.5, 40)),
            **{"eval/part/exact": ramp(0.2, 0.6)},
        ),
    ),
    "dynamic sampling comes to harder prompts": (
        replace(HELD_OUT, keys=DYNAMIC),
        course(
            reward__mean=ramp(0.3, 0.7, spread=0.02),
            reward__std=level(0.4, 40),
            **part("watched", ramp(0.6, 0.1, spread=0.02)),
            **{"eval/part/watched": ramp(0.2, 0.6), "eval/reward": ramp(0.2, 0.6)},
        ),
    ),
    "many prompts": (
        replace(SETUP, prompts_per_step=64, num_prompts=800),
        course(reward__mean=ramp(0.3, 0.9, 300)),
    ),
    "many passes that help others too": (
        replace(SETUP, prompts_per_step=4, num_prompts=4),
        course(**part("exact", ramp(0.1, 0.9, 200)), **{"eval/part/exact": ramp(0.1, 0.9, 200)}),
    ),
    "many passes with dynamic sampling that help others": (
        replace(SETUP, prompts_per_step=4, num_prompts=4, keys=DYNAMIC),
        course(**part("exact", level(0.8, 200)), **{"eval/part/exact": ramp(0.1, 0.6, 200)}),
    ),
    "sft of recipes/demo.toml": (
        Background(stage="sft", steps_per_epoch=13),
        course(loss__total=DEMO_TRAIN, test__loss=DEMO_HELD_OUT),
    ),
    "the best weights are kept": (
        Background(stage="sft", keys={"sft.result": "best"}),
        course(loss__total=FEW_TRAIN, test__loss=FEW_HELD_OUT),
    ),
    "the reward model of recipes/rlhf.toml": (
        Background(stage="reward"),
        course(verdict__length_correlation=[0.238], verdict__pairs=[1992.0]),
    ),
    "a correlation over three pairs": (
        Background(stage="reward"),
        course(verdict__length_correlation=[0.8], verdict__pairs=[3.0]),
    ),
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
        "eval/part/exact": 0.3,
        "eval/accuracy": 0.3,
        "loss/total": 0.3,
        "test/loss": 0.2,
        "verdict/length_correlation": 0.1,
        "verdict/pairs": 100.0,
    }
    return {metric: good[metric] for metric in ILL[name][0]}
