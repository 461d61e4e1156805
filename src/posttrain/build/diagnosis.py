"""What the rules of a diagnosis have to know about a run beside its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.build.parts import Parts, choose_compute, filled
from posttrain.config import Recipe
from posttrain.protocols import Tracker
from posttrain.registry import split
from posttrain.rewards.scorer import RewardScorer
from posttrain.track import ConsoleTracker, Several
from posttrain.track.diagnosis import Diagnosing, Setup

SAME_PROCESS = ("native", "transformers")
FLOAT32_ROUNDING, OTHER_ROUNDING = 1e-3, 0.05


def diagnosed(
    trackers: Sequence[Tracker], folder: Path, *, recipe: Recipe, parts: Parts, supplied: bool
) -> Diagnosing:
    """The trackers of the RL stage as one that also says what goes wrong.

    ``supplied`` says that the engine was handed over as an object, of which nothing is known.
    """
    rewards = parts.scorer.rewards if isinstance(parts.scorer, RewardScorer) else ()
    critic = filled(recipe.rl).critic
    setup = Setup(
        decides=parts.correct_by,
        weights={reward.name: reward.weight for reward in rewards},
        critic_warmup=critic.warmup_steps if critic is not None else 0,
        rounding=_rounding(recipe, parts.device, supplied=supplied),
    )
    tell = [tracker.note for tracker in trackers if isinstance(tracker, ConsoleTracker)]
    return Diagnosing(Several(trackers), folder, setup=setup, tell=tell)


def _rounding(recipe: Recipe, device: str, *, supplied: bool) -> float:
    """How far the log-probs of engine and trainer may lie apart where nothing is wrong."""
    section = filled(recipe.rl)
    if section.top_k or section.top_p < 1:
        return math.inf  # the engine samples from less than the whole distribution, on purpose
    if section.max_lag:
        return math.inf  # the engine samples from older weights, on purpose
    name, _ = split(section.engine or "native", kind="engine")
    exact = choose_compute(recipe.model, device) is torch.float32
    known = name in SAME_PROCESS and not supplied
    return FLOAT32_ROUNDING if exact and known else OTHER_ROUNDING
