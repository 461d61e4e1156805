"""Preferences without people: a simulated annotator who compares scores, with an error rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.preference_sets import Ranked
from posttrain.types import Rollout

ROUNDING = 1e-9  # 0.7 − 0.4 is 0.29999999999999993 in floats


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """The preferences, how many comparisons had no winner, and how many went the wrong way.

    ``broken`` counts the completions that the rewards could not score.
    """

    sets: Sequence[Ranked] = ()
    ties: int = 0
    errors: int = 0
    broken: int = 0

    def __add__(self, other: Annotated) -> Annotated:
        return Annotated(
            sets=[*self.sets, *other.sets],
            ties=self.ties + other.ties,
            errors=self.errors + other.errors,
            broken=self.broken + other.broken,
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
    read once. ``ranked`` puts them all in order instead. The annotator compares scores, and each
    comparison (for a ranking: of two neighbours) goes the wrong way with ``error_rate``. Scores
    that are equal or closer than ``min_gap``, equal or empty texts, and broken scores give no
    preference.
    """
    scored = [r for r in rollouts if r.score is not None and r.score.ok]
    broken = len(rollouts) - len(scored)
    able = [rollout for rollout in scored if _text(rollout)]
    if ranked:
        order = _apart(able, min_gap)
        ties = len(rollouts) - len(order)
        errors = _err(order, error_rate=error_rate, generator=generator)
        sets = [_ranked(order)] if len(order) > 1 else []
        return Annotated(sets=sets, ties=ties, errors=errors, broken=broken)
    sets, errors = [], 0
    for pair in zip(able[::2], able[1::2], strict=False):
        better, worse = sorted(pair, key=_value, reverse=True)
        if len(_apart([better, worse], min_gap)) < 2:
            continue
        if generator.random() < error_rate:
            better, worse = worse, better
            errors += 1
        sets.append(_ranked([better, worse]))
    ties = len(rollouts) // 2 - len(sets)
    return Annotated(sets=sets, ties=ties, errors=errors, broken=broken)


def _apart(rollouts: Sequence[Rollout], min_gap: float) -> list[Rollout]:
    """Best first, without those whose score or text equals that of a better one: no ties remain."""
    kept: list[Rollout] = []
    for rollout in sorted(rollouts, key=_value, reverse=True):
        gap = _value(kept[-1]) - _value(rollout) if kept else math.inf
        known = any(_text(rollout) == _text(better) for better in kept)
        if gap > 0 and gap >= min_gap - ROUNDING and not known:
            kept.append(rollout)
    return kept


def _err(order: list[Rollout], *, error_rate: float, generator: random.Random) -> int:
    """Swap neighbours in ``order`` with ``error_rate``; returns how many swaps were made."""
    errors, place = 0, 0
    while place < len(order) - 1:
        if generator.random() < error_rate:
            order[place], order[place + 1] = order[place + 1], order[place]
            errors += 1
            place += 1  # a completion takes part in one swap at most
        place += 1
    return errors


def _value(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score.value


def _text(rollout: Rollout) -> str:
    """The text that is compared, without white space around it."""
    return rollout.text.strip()


def _ranked(rollouts: Sequence[Rollout]) -> Ranked:
    prompt = rollouts[0].prompt
    return Ranked(
        prompt="" if prompt.messages else prompt.text,
        messages=prompt.messages,
        completions=tuple(rollout.text for rollout in rollouts),
        ended=tuple(rollout.stop_reason != "length" for rollout in rollouts),
    )
