"""Sections with nothing missing: what :func:`posttrain.config.resolve` makes of those written.

Each redeclares the keys that always have a value once resolved, and no others. A key without
effect (``max_resamples`` without ``dynamic_sampling``) has its default too, and is left out where a
recipe is shown. Sections that are not here are the same before and after.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PrivateAttr

from posttrain.algorithms.choices import Direction, Estimator, Placement, Rule
from posttrain.config.data_stages import RewardSection, SftSection, WrittenDpo, WrittenPrefer
from posttrain.config.fields import Piece, Stages
from posttrain.config.sections import (
    Recipe,
    WrittenCritic,
    WrittenEval,
    WrittenKl,
    WrittenRl,
    WrittenRun,
)


class RunSection(WrittenRun):
    """``[run]``, resolved."""

    stages: Stages


class PreferSection(WrittenPrefer):
    """``[prefer]``, resolved."""

    max_new_tokens: int


class DpoSection(WrittenDpo):
    """``[dpo]``, resolved; options that its loss has not are None."""

    beta: float


class KlSection(WrittenKl):
    """``[rl.kl]``, resolved."""

    placement: Placement
    coefficient: float
    estimator: Estimator
    direction: Direction
    weighted: bool
    rule: Rule
    horizon: int
    refresh_every: int
    dtype: Literal["model", "bfloat16"]
    offload: bool


class CriticSection(WrittenCritic):
    """``[rl.critic]``, resolved."""

    source: str
    learning_rate: float
    loss: Piece


class RlSection(WrittenRl):
    """``[rl]``, resolved; its engine is None where it is handed over as an object."""

    group_size: int
    epochs: int
    advantage: Piece
    loss: Piece
    weights: Piece
    kl: KlSection
    critic: CriticSection | None
    correction: Piece
    dynamic_sampling: bool
    max_resamples: int
    overlong_buffer: int
    evaluate_problems: int

    @property
    def ahead(self) -> int:
        """Updates that sampling runs ahead of learning: max_lag less those of partial rollouts."""
        return self.max_lag - (self.partial - 1)


class EvalSection(WrittenEval):
    """``[eval]``, resolved."""

    temperature: float
    max_new_tokens: int


class Resolved(Recipe):
    """A recipe with every default filled in, and every rule checked.

    It has the sections of the stages that are run, and no others: what else was written stands in
    ``written``.
    """

    run: RunSection
    sft: SftSection
    prefer: PreferSection
    reward: RewardSection
    dpo: DpoSection
    rl: RlSection
    eval: EvalSection

    _written: Recipe = PrivateAttr()

    @property
    def written(self) -> Recipe:
        """The recipe as it was written, before it was resolved."""
        return self._written

    @property
    def for_evaluations(self) -> WrittenRl | None:
        """``[rl]`` for evaluations, which take settings from it even where the stage is not run."""
        return self.rl if "rl" in self.stages else self.written.rl
