"""The rules about what the reward teaches: they compare its parts with one another over time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from posttrain.track.curves import ends, over_steps
from posttrain.track.diagnosis.history import (
    FULL,
    WINDOW,
    Background,
    History,
    Seen,
    blocks,
    evaluations,
    gap,
    look_error,
    mostly,
    noise,
    progress,
    resamples,
    scaled,
    series,
    share_error,
)

ACCURACY = "held-out accuracy"
OVER = f"training reward ({WINDOW} steps each)"
SHARP = 0.2  # of full marks, within the first steps
_LONG = 3 * WINDOW  # often the format comes first and the answers follow: they get this long


def format_learned_accuracy_flat(history: History, setup: Background) -> Seen | None:
    """A part of the reward rose to 0.8 in 12 of 15 steps while the part that decides is flat."""
    lately = series(history[-_LONG:], f"eval/part/{setup.decides}")
    found = progress(history, setup)
    if len(series(history, f"reward/part/{setup.decides}")) < _LONG + WINDOW or found is None:
        return None
    if resamples(history, setup) and not lately:
        return None
    before, flat = found
    if flat >= 0.8 or abs(flat - before) > 0.05:  # risen; or fallen, which is hacking
        return None
    for name, weight in setup.weights.items():
        part = f"reward/part/{name}"
        now = mostly(history, part, test=lambda value: value >= 0.8, steps=_LONG)
        if name == setup.decides or weight <= 0 or now is None:
            continue
        start = statistics.fmean(series(history, part)[:WINDOW])
        if now >= start + 0.2:
            text = f"{name} went from {setup.marks(name, start)} to {setup.marks(name, now)}, "
            text += f"while {setup.decides} stays at {setup.marks(setup.decides, flat)}"
            if setup.weights.get(setup.decides) == 0:
                text += f", which has weight 0 in [rewards]: give {setup.decides} a weight"
                return Seen(text, case="what decides has weight 0", change=_weighed(setup))
            return Seen(text, change=scaled(setup, _weight(setup, name), by=0.5))
    return None


def _weighed(setup: Background) -> str:
    """The override that gives the reward that decides a weight, where the recipe names it.

    A check that the task brings has options of its own, which an override would lose.
    """
    key = _weight(setup, setup.decides)
    return f"--{key} 1.0" if key in setup.keys else ""


def hacking(history: History, setup: Background) -> Seen | None:
    """reward/mean rises while eval/accuracy, or a reward that is only monitored, falls by a tenth,
    or at once to less than half of what it was; with dynamic sampling, all three on held-out
    problems. At the end, the first and the last evaluation count too.
    """
    found = [(setup.decides, _look_fell(history, setup, metric="eval/accuracy", name=ACCURACY))]
    for name in _monitored(setup):
        if resamples(history, setup):
            metric = f"eval/part/{name}"
            said = _look_fell(history, setup, metric=metric, name=f"held-out {name}")
        else:
            said = _part_fell(history, setup, name=name) or _at_once(history, setup, name=name)
        found.append((name, said))
    return _first_seen(history, setup, found=found)


def hacking_at_end(history: History, setup: Background) -> Seen | None:
    """The same, and what held-out problems were at the start of the run and at its end."""
    seen = hacking(history, setup)
    known = gap(history, setup)
    if seen is not None or (known is not None and known.clear):
        return seen  # where train prompts are known by heart, memorised speaks of it
    found = [(setup.decides, _ended_lower(history, setup, metric="eval/accuracy", name=ACCURACY))]
    for name in _monitored(setup):
        metric = f"eval/part/{name}"
        said = _ended_lower(history, setup, metric=metric, name=f"held-out {name}")
        found.append((name, said))
    return _first_seen(history, setup, found=found)


def _monitored(setup: Background) -> list[str]:
    return [name for name, weight in setup.weights.items() if weight == 0]


def _first_seen(
    history: History, setup: Background, *, found: Sequence[tuple[str, str | None]]
) -> Seen | None:
    """The first that fell, and as many steps as there were before it did, where that is known."""
    name, text = next(((name, said) for name, said in found if said is not None), ("", None))
    if text is None:
        return None
    step = None if resamples(history, setup) else _last_good_step(history, name)
    if step is not None:
        return Seen(f"{text}; {name} fell after step {step}", change=f"--rl.steps {step}")
    change = scaled(setup, "rl.kl.coefficient", by=3) or scaled(setup, "rl.steps", by=0.5)
    return Seen(text, change=change)


def _weight(setup: Background, name: str) -> str:
    """The key of a reward's weight: a function goes by its own name, its table by its module too.

    >>> _weight(Background(keys={"rewards.my.module:tidy.weight": 1.0}), "tidy")
    'rewards.my.module:tidy.weight'
    """
    own = [key for key in setup.keys if key.startswith("rewards.")]
    named = [key for key in own if key.endswith(f":{name}.weight")]
    return named[0] if len(named) == 1 else f"rewards.{name}.weight"


def _look_fell(history: History, setup: Background, *, metric: str, name: str) -> str | None:
    """Two evaluations in a row below the best one: one alone may be bad luck."""
    places = [at for at, record in enumerate(history) if series([record], metric)]
    if len(places) < 3:
        return None
    best = max(places[:-2], key=lambda at: history[at][metric])
    peak = history[best][metric]
    now = max(history[at][metric] for at in places[-2:])
    if now > peak - 0.1 * max(1.0, abs(peak)):
        return None
    if resamples(history, setup):
        rewards = _held_out_rise(history, setup, places=[best, *places[-2:]])
    else:
        rewards = _training_rise(history, best)
    kind = "held-out reward" if resamples(history, setup) else OVER
    return _hacked(name, f"{peak:.2f} to {now:.2f}", kind=kind, rewards=rewards)


def _training_rise(history: History, best: int) -> tuple[float, float] | None:
    """The training reward around a place and in the last steps, where it rose beyond chance."""
    near = series(history[max(0, best + 1 - WINDOW) : best + 1], "reward/mean")
    near = near or series(history[: best + 1 + WINDOW], "reward/mean")  # before the first step
    rewards = series(history, "reward/mean")
    if not near or len(rewards) < WINDOW:
        return None
    before, after = statistics.fmean(near), statistics.fmean(rewards[-WINDOW:])
    return (before, after) if after - before > noise(rewards) else None


def _held_out_rise(
    history: History, setup: Background, *, places: Sequence[int]
) -> tuple[float, float] | None:
    """The held-out reward at the first of three evaluations and in the two others, likewise."""
    looks = evaluations([history[at] for at in places], setup, name="eval/reward")
    if len(looks) < 3:
        return None
    before, after = looks[0][0], (looks[1][0] + looks[2][0]) / 2
    error = look_error(history, [problems for _, problems in looks[1:]])
    return (before, after) if after - before > error else None


def _part_fell(history: History, setup: Background, *, name: str) -> str | None:
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
    fell = f"{setup.marks(name, means[best])} to {setup.marks(name, means[-1])}"
    return _hacked(name, fell, rewards=(rewarded[best], rewarded[-1]))


def _at_once(history: History, setup: Background, *, name: str) -> str | None:
    """The later half of the steps all below half of the start, the last ones rewarded more.

    The start are the first two steps, or the first and an evaluation before it. A fall within the
    first steps is wide inside their blocks, which would take it for noise.
    """
    parts, rewards = series(history, f"reward/part/{name}"), series(history, "reward/mean")
    if len(parts) != len(rewards) or len(parts) < WINDOW + 2:
        return None
    known = series(history[:1], f"eval/part/{name}") if "step" not in history[0] else []
    start = [*known, *parts[:2]][:2]
    first, last = min(start), max(parts[-max(WINDOW, len(parts) // 2) :])
    if last > first / 2 or first - last < SHARP or min(rewards[-WINDOW:]) <= rewards[0]:
        return None
    before, after = parts[0], statistics.fmean(parts[-WINDOW:])
    fell = f"{setup.marks(name, before)} to {setup.marks(name, after)}"
    rose = (rewards[0], statistics.fmean(rewards[-WINDOW:]))
    kind = f"training reward (first step and last {WINDOW})"
    return _hacked(name, fell, kind=kind, rewards=rose)


def _ended_lower(history: History, setup: Background, *, metric: str, name: str) -> str | None:
    """The last evaluation below the first beyond chance, while the training reward rose so."""
    looks = evaluations(history, setup, name=metric)
    if len(looks) < 2:
        return None
    (before, first), (after, last) = looks[0], looks[-1]
    if min(before, after) >= 0 and max(before, after) <= FULL:
        error = math.hypot(share_error(before, first), share_error(after, last))
        fell = f"{before:.1%} to {after:.1%} of {last} problems"
    else:  # scores of any scale: spread as widely as those of the train prompts
        error = look_error(history, (first, last))
        fell = f"{before:.3f} to {after:.3f}"
    if before - after <= max(2.5 * error, 0.05 * max(1.0, abs(before))):
        return None
    if resamples(history, setup):
        rewarded = evaluations(history, setup, name="eval/reward")
        rose = rewarded[-1][0] - rewarded[0][0] if len(rewarded) > 1 else 0.0
        if rose <= 2 * look_error(history, (first, last)):
            return None
        rewards = (rewarded[0][0], rewarded[-1][0])
        return _hacked(name, fell, kind="held-out reward", rewards=rewards)
    values = series(history, "reward/mean")
    trained = ends(values)
    if trained is None or trained.last - trained.first <= 2 * noise(values, steps=trained.num):
        return None
    kind = f"training reward ({over_steps(trained.num)})"
    return _hacked(name, fell, kind=kind, rewards=(trained.first, trained.last))


def _last_good_step(history: History, name: str) -> int | None:
    """The step after which a reward on train prompts left its height, where it did."""
    metric = f"reward/part/{name}"
    records = [record for record in history if series([record], metric)]
    parts = series(records, metric)
    if len(parts) < WINDOW + 2:
        return None
    pairs = [(one + two) / 2 for one, two in itertools.pairwise(parts)]
    peak = max(range(len(pairs)), key=pairs.__getitem__)
    now = statistics.fmean(parts[-WINDOW:])
    high = now + 0.75 * (pairs[peak] - now)
    if pairs[peak] - now < 0.1 * max(1.0, abs(pairs[peak])):
        return None
    low = next((at for at in range(peak + 1, len(pairs)) if max(parts[at : at + 2]) < high), None)
    step = int(records[low].get("step", low + 1)) - 1 if low is not None else 0
    return step if step > 0 else None


def _hacked(
    name: str, fell: str, *, rewards: tuple[float, float] | None, kind: str = OVER
) -> str | None:
    if rewards is None:
        return None
    rose = f"the {kind} rose from {rewards[0]:.2f} to {rewards[1]:.2f}"
    return f"{rose}, while {name} fell from {fell}"
