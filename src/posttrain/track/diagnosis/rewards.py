"""The rules about what the reward teaches: they compare its parts with one another over time."""

from __future__ import annotations

import statistics

from posttrain.track.diagnosis.history import (
    WINDOW,
    History,
    Seen,
    Setup,
    blocks,
    mostly,
    noise,
    scaled,
    series,
)

_LONG = 3 * WINDOW  # often the format comes first and the answers follow: they get this long


def format_learned_accuracy_flat(history: History, setup: Setup) -> Seen | None:
    """A part of the reward rose to 0.8 in 12 of 15 steps while the part that decides is flat."""
    decides = series(history, f"reward/part/{setup.decides}")
    if len(decides) < _LONG + WINDOW:
        return None
    flat, before = statistics.fmean(decides[-WINDOW:]), statistics.fmean(decides[:WINDOW])
    if flat >= 0.8 or abs(flat - before) > 0.05:  # risen; or fallen, which is hacking
        return None
    for name, weight in setup.weights.items():
        part = f"reward/part/{name}"
        now = mostly(history, part, test=lambda value: value >= 0.8, steps=_LONG)
        if name == setup.decides or weight <= 0 or now is None:
            continue
        start = statistics.fmean(series(history, part)[:WINDOW])
        if now >= start + 0.2:
            text = f"{name} went from {start:.2f} to {now:.2f}, while {setup.decides} stays at"
            return Seen(f"{text} {flat:.2f}", change=scaled(setup, _weight(name), by=0.5))
    return None


def hacking(history: History, setup: Setup) -> Seen | None:
    """reward/mean rises while eval/accuracy, or a reward that is only watched, falls by a tenth."""
    watched = [name for name, weight in setup.weights.items() if weight == 0]
    found = [_accuracy_fell(history), *(_part_fell(history, name) for name in watched)]
    text = next((said for said in found if said is not None), None)
    if text is None:
        return None
    change = scaled(setup, "rl.kl.coefficient", by=3) or scaled(setup, "rl.steps", by=0.5)
    return Seen(text, change=change)


def _weight(name: str) -> str:
    return f"rewards.{name}.weight"


def _accuracy_fell(history: History) -> str | None:
    """Two evaluations in a row below the best one: one alone may be bad luck."""
    places = [at for at, record in enumerate(history) if "eval/accuracy" in record]
    if len(places) < 3:
        return None
    best = max(places[:-2], key=lambda at: history[at]["eval/accuracy"])
    peak = history[best]["eval/accuracy"]
    now = max(history[at]["eval/accuracy"] for at in places[-2:])
    near = series(history[max(0, best + 1 - WINDOW) : best + 1], "reward/mean")
    near = near or series(history[: best + 1 + WINDOW], "reward/mean")  # before the first step
    rewards = series(history, "reward/mean")
    if now > peak - 0.1 or not near or len(rewards) < WINDOW:
        return None
    before, after = statistics.fmean(near), statistics.fmean(rewards[-WINDOW:])
    if after - before <= noise(rewards):
        return None
    return _hacked("held-out accuracy", (peak, now), rewards=(before, after))


def _part_fell(history: History, name: str) -> str | None:
    """The last two blocks of steps below the best one, beyond what chance and scale allow."""
    both = [
        record
        for record in history
        if series([record], "reward/mean") and series([record], f"reward/part/{name}")
    ]
    parts, rewards = series(both, f"reward/part/{name}"), series(both, "reward/mean")
    means = [statistics.fmean(block) for block in blocks(parts)]
    if len(means) < 3:
        return None
    best = max(range(len(means) - 2), key=means.__getitem__)
    fall = means[best] - max(means[-2:])
    rewarded = [statistics.fmean(block) for block in blocks(rewards)]
    rise = rewarded[-1] - rewarded[best]
    # The best of many blocks is lucky: a fall has to be larger than that luck.
    if fall <= max(0.1 * max(map(abs, parts)), 4 * noise(parts)) or rise <= 2 * noise(rewards):
        return None
    return _hacked(name, (means[best], means[-1]), rewards=(rewarded[best], rewarded[-1]))


def _hacked(name: str, fell: tuple[float, float], *, rewards: tuple[float, float]) -> str:
    return (
        f"the reward rose from {rewards[0]:.2f} to {rewards[1]:.2f}, "
        f"while {name} fell from {fell[0]:.2f} to {fell[1]:.2f}"
    )
