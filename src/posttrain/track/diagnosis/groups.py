"""The rules about what is sampled: whether it differs, comes to an end, and can be graded."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable

from posttrain.track.diagnosis.history import (
    AGREE,
    FULL,
    WINDOW,
    Background,
    Check,
    History,
    Seen,
    gap,
    level,
    mostly,
    rising,
    scaled,
    series,
    sft_scaled,
)


def no_signal(history: History, setup: Background, *, steps: int = WINDOW) -> Seen | None:
    """At least 99 % of the groups agree in 4 of 5 steps; with single completions, all rewards."""
    setup = setup.learned_from
    agreed = mostly(history, AGREE, test=lambda share: share >= 0.99, steps=steps)
    equal = mostly(history, "reward/std", test=lambda spread: spread == 0, steps=steps)
    alone = not series(history[-steps:], AGREE)
    if agreed is None and not (alone and equal is not None):
        return None
    if mostly(history, "reward/invalid", test=lambda share: share == 1, steps=steps) is not None:
        return None  # where graders break, the rule grader_failing applies
    case, change = _agreement(history, setup, equal=equal is not None)
    what = "all rewards are equal" if agreed is None else f"{agreed:.0%} of groups agree"
    value = setup.marks(setup.decides, level(history, setup))
    whose = "the environment's score" if setup.environment else setup.decides or "reward"
    text = f"nothing to learn from: {what}: {case} ({whose} {value})"
    return Seen(text, case=case, change=change)


def _agreement(history: History, setup: Background, *, equal: bool) -> tuple[str, str]:
    """Why the rewards of a group are equal, and what to change."""
    value = level(history, setup)
    wrong = value <= 0.05 and (setup.decides or value == 0)
    if setup.environment:  # its scores may be of any scale, below 0 too
        wrong = equal and value == 0
    if wrong:
        case = "every episode scores 0" if setup.environment else "all wrong"
        if setup.warmed_up:
            return f"{case} after [sft]", sft_scaled(setup, by=2)
        if setup.keys.get("model.name") == "tiny":
            return f"{case} with random weights", ""
        return case, scaled(setup, "rl.group_size", by=4)
    if 0.95 <= value <= FULL and (setup.decides or gap(history, setup) is not None):
        return _all_right(history, setup)
    if equal:
        return f"every {'episode' if setup.environment else 'answer'} gets the same", ""
    return "each prompt is always right or always wrong", scaled(setup, "rl.group_size", by=2)


def _all_right(history: History, setup: Background) -> tuple[str, str]:
    found = gap(history, setup)
    if found is None:
        return "all right, and held-out ones are not known", ""
    if found.clear:
        change = sft_scaled(setup, by=0.3) if setup.warmed_up else ""
        return "all right on train prompts, and not on held-out ones", change
    return "all right", ""


def all_truncated(history: History, setup: Background, *, steps: int = WINDOW) -> Seen | None:
    """rollout/truncated is above 0.9 in 4 of 5 steps, and the training reward does not rise beyond
    chance; not for moves of one token in a game.
    """
    if setup.environment and setup.keys.get("rl.max_new_tokens") == 1:
        return None  # the environment takes each token for a whole turn: nothing is cut
    if rising(series(history, "reward/mean")):
        return None  # what is cut earns more and more: the reward may well ask for it
    share = mostly(history, "rollout/truncated", test=lambda value: value > 0.9, steps=steps)
    if share is None:
        return None
    case = "after [sft]" if setup.warmed_up else "without [sft]"
    text = f"{share:.0%} of the completions are cut by the length limit"
    return Seen(text, case=case, change=scaled(setup, "rl.max_new_tokens", by=2))


def grader_failing(history: History, setup: Background, *, steps: int = WINDOW) -> Seen | None:
    """reward/invalid is above 0 in 4 of 5 steps; env/errors says whether environments broke."""
    share = mostly(history, "reward/invalid", test=lambda value: value > 0, steps=steps)
    if share is None:
        return None
    before = series(history, "reward/invalid")[-3 * WINDOW : -WINDOW]
    rising = ", and rising" if before and share > 2 * statistics.fmean(before) else ""
    kinds = _broken_environments(history[-steps:])
    if kinds:
        text = f"{share:.1%} of the episodes are invalid{rising}: environments broke"
        return Seen(f"{text} ({', '.join(kinds)})", case="environments")
    return Seen(f"the grader broke on {share:.1%} of the completions{rising}")


def _broken_environments(history: History) -> list[str]:
    """How environments broke episodes, most often first; one that cannot count or close does not.

    >>> _broken_environments([{"env/errors/timeout": 2.0, "env/errors/close": 9.0}, {}])
    ['timeout']
    """
    found: Counter[str] = Counter()
    for record in history:
        for name, value in record.items():
            kind = name.removeprefix("env/errors/")
            if kind not in (name, "counts", "close"):
                found[kind] += int(value)
    return [kind for kind, _ in found.most_common()]


def in_all(check: Callable[..., Seen | None]) -> Check:
    """The same of a stage of fewer than five steps, where it holds in all of them."""

    def at_end(history: History, setup: Background) -> Seen | None:
        steps = min(WINDOW, max(1, len(series(history, "reward/invalid"))))
        return check(history, setup, steps=steps)

    return at_end
