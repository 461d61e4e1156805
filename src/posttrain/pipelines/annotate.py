"""Preferences without people: an annotator who goes by a score, and errs at a set rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.preferences import Ranked
from posttrain.types import Rollout

ROUNDING = 1e-9  # 0.8 − 0.5 is a gap of 0.3


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """The preferences, how many comparisons had no winner, and how many went the wrong way."""

    sets: Sequence[Ranked]
    ties: int
    errors: int

    def __add__(self, other: Annotated) -> Annotated:
        return Annotated(
            sets=[*self.sets, *other.sets],
            ties=self.ties + other.ties,
            errors=self.errors + other.errors,
        )


def annotate(
    rollouts: Sequence[Rollout],
    *,
    error_rate: float,
    ranked: bool,
    generator: random.Random,
    min_gap: float = 0.0,
) -> Annotated:
    """Compare the scored completions of one prompt.

    As pairs, the first with the second, the third with the fourth, and so on: every completion is
    read once. ``ranked`` puts them all in order instead. The annotator goes by the score, and each
    comparison (for a ranking: of two neighbours) goes the wrong way with ``error_rate``. Scores
    that are equal or closer than ``min_gap``, equal or empty texts, and broken scores give no
    preference.
    """
    able = [r for r in rollouts if r.score is not None and r.score.ok and r.completion.text.strip()]
    if ranked:
        apart = _apart(able, min_gap)
        return _ranking(apart, num_given=len(rollouts), error_rate=error_rate, generator=generator)
    sets: list[Ranked] = []
    errors = 0
    for pair in zip(able[::2], able[1::2], strict=False):
        better, worse = sorted(pair, key=_value, reverse=True)
        if len(_apart([better, worse], min_gap)) < 2:
            continue
        if generator.random() < error_rate:
            better, worse = worse, better
            errors += 1
        sets.append(_ranked([better, worse]))
    return Annotated(sets=sets, ties=len(rollouts) // 2 - len(sets), errors=errors)


def _apart(rollouts: Sequence[Rollout], min_gap: float) -> list[Rollout]:
    """Best first, those left out that cannot be told from a better one: no ties remain."""
    kept: list[Rollout] = []
    for rollout in sorted(rollouts, key=_value, reverse=True):
        gap = _value(kept[-1]) - _value(rollout) if kept else math.inf
        known = any(_text(rollout) == _text(better) for better in kept)
        if gap > 0 and gap >= min_gap - ROUNDING and not known:
            kept.append(rollout)
    return kept


def _ranking(
    order: list[Rollout], *, num_given: int, error_rate: float, generator: random.Random
) -> Annotated:
    errors, place = 0, 0
    while place < len(order) - 1:
        if generator.random() < error_rate:
            order[place], order[place + 1] = order[place + 1], order[place]
            errors += 1
            place += 1  # what was just swapped down stays there
        place += 1
    ties = num_given - len(order)
    sets = [_ranked(order)] if len(order) > 1 else []
    return Annotated(sets=sets, ties=ties, errors=errors)


def _value(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score.value


def _text(rollout: Rollout) -> str:
    """What is compared: white space around a text makes it no other text."""
    return rollout.completion.text.strip()


def _ranked(rollouts: Sequence[Rollout]) -> Ranked:
    prompt = rollouts[0].prompt
    return Ranked(
        prompt="" if prompt.messages else prompt.text,
        messages=prompt.messages,
        completions=tuple(rollout.completion.text for rollout in rollouts),
    )
