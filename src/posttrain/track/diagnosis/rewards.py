"""The rules about what the reward teaches: they compare its parts with one another over time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from posttrain.track.diagnosis.history import (
    FULL,
    WINDOW,
    Background,
    History,
    Seen,
    blocks,
    evaluation_error,
    evaluations,
    gap,
    mostly,
    noise,
    progress,
    resamples,
    scaled,
    series,
    share_error,
)
from posttrain.track.shown import ends, over_steps

ACCURACY = "held-out accuracy"
OVER = f"training reward ({WINDOW} steps each)"
SHARP = 0.2  # share of full marks that a sharp fall within the first steps loses
_LONG = 3 * WINDOW  # steps: often the format is learned first and the answers later


def format_learned_accuracy_flat(history: History, setup: Background) -> Seen | None:
    """A part of the reward rose to 0.8 in 12 of 15 steps while the part that decides is flat."""
    lately = series(history[-_LONG:], f"eval/part/{setup.decides}")
    found = progress(history, setup)
    if len(series(history, f"reward/part/{setup.decides}")) < _LONG + WINDOW or found is None:
        return None
    if resamples(history, setup) and not lately:
        return None
    before, flat = found
    if flat >= 0.8 or abs(flat - before) > 0.05:  # rose, or fell, which the rule hacking reports
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
            if setup.only_monitored:
                text += f", which has weight 0 in [rewards]: give {setup.decides} a weight"
                return Seen(text, case="what decides has weight 0", change=_weighed(setup))
            return Seen(text, change=scaled(setup, _weight(setup, name), by=0.5))
    return None


def _weighed(setup: Background) -> str:
    """The override that gives the reward that decides a weight, where the recipe names it.

    No override for a check that comes with the task: it would lose the options of that check.
    """
    key = _weight(setup, setup.decides)
    return f"--{key} 1.0" if key in setup.keys else ""


def hacking(history: History, setup: Background) -> Seen | None:
    """reward/mean rises while eval/accuracy, or a reward that is only monitored, falls by a tenth,
    or at once to less than half of what it was; with dynamic sampling, all three on held-out
    problems. At the end, the first and the last evaluation count too.
    """
    found = [(setup.decides, _eval_fell(history, setup, metric="eval/accuracy", name=ACCURACY))]
    for name in _monitored(setup):
        if resamples(history, setup):
            metric = f"eval/part/{name}"
            text = _eval_fell(history, setup, metric=metric, name=f"held-out {name}")
        else:
            text = _part_fell(history, setup, name=name) or _at_once(history, setup, name=name)
        found.append((name, text))
    return _first_seen(history, setup, found=found)


def hacking_at_end(history: History, setup: Background) -> Seen | None:
    """The same, and what held-out problems were at the start of the run and at its end."""
    seen = hacking(history, setup)
    known = gap(history, setup)
    if seen is not None or (known is not None and known.clear):
        return seen  # where train prompts are memorised, the rule memorised applies
    found = [(setup.decides, _ended_lower(history, setup, metric="eval/accuracy", name=ACCURACY))]
    for name in _monitored(setup):
        metric = f"eval/part/{name}"
        text = _ended_lower(history, setup, metric=metric, name=f"held-out {name}")
        found.append((name, text))
    return _first_seen(history, setup, found=found)


def _monitored(setup: Background) -> list[str]:
    return [name for name, weight in setup.weights.items() if weight == 0]


def _first_seen(
    history: History, setup: Background, *, found: Sequence[tuple[str, str | None]]
) -> Seen | None:
    """The first reward that fell, with the number of steps before its fall where it is known."""
    name, text = next(((name, text) for name, text in found if text is not None), ("", None))
    if text is None:
        return None
    if name == setup.decides and setup.only_monitored:
        return Seen(text, case="what decides has weight 0", change=_weighed(setup))
    step = None if resamples(history, setup) else _last_good_step(history, name)
    if step is not None:
        return Seen(f"{text}; {name} fell after step {step}", change=f"--rl.steps {step}")
    change = scaled(setup, "rl.kl.coefficient", by=3) or scaled(setup, "rl.steps", by=0.5)
    return Seen(text, change=change)


def _weight(setup: Background, name: str) -> str:
    """The key of a reward's weight; for ``"module:function"`` the name is that of the function.

    >>> _weight(Background(keys={"rewards.my.module:tidy.weight": 1.0}), "tidy")
    'rewards.my.module:tidy.weight'
    """
    own = [key for key in setup.keys if key.startswith("rewards.")]
    named = [key for key in own if key.endswith(f":{name}.weight")]
    return named[0] if len(named) == 1 else f"rewards.{name}.weight"


def _eval_fell(history: History, setup: Background, *, metric: str, name: str) -> str | None:
    """Two evaluations in a row below the best one: one alone may be bad luck."""
    indices = [at for at, record in enumerate(history) if series([record], metric)]
    if len(indices) < 3:
        return None
    best = max(indices[:-2], key=lambda at: history[at][metric])
    peak = history[best][metric]
    now = max(history[at][metric] for at in indices[-2:])
    if now > peak - 0.1 * max(1.0, abs(peak)):
        return None
    if resamples(history, setup):
        rewards = _held_out_rise(history, setup, indices=[best, *indices[-2:]])
    else:
        rewards = _training_rise(history, best)
    kind = "held-out reward" if resamples(history, setup) else OVER
    return _hacked(setup, name, fell=f"{peak:.2f} to {now:.2f}", kind=kind, rewards=rewards)


def _training_rise(history: History, best: int) -> tuple[float, float] | None:
    """The training reward around step ``best`` and in the last steps, if it rose beyond chance."""
    near = series(history[max(0, best + 1 - WINDOW) : best + 1], "reward/mean")
    # The best evaluation may be one before the first step.
    near = near or series(history[: best + 1 + WINDOW], "reward/mean")
    rewards = series(history, "reward/mean")
    if not near or len(rewards) < WINDOW:
        return None
    before, after = statistics.fmean(near), statistics.fmean(rewards[-WINDOW:])
    return (before, after) if after - before > noise(rewards) else None


def _held_out_rise(
    history: History, setup: Background, *, indices: Sequence[int]
) -> tuple[float, float] | None:
    """The held-out reward at the first of three evaluations and in the others, if it rose."""
    looks = evaluations([history[at] for at in indices], setup, name="eval/reward")
    if len(looks) < 3:
        return None
    before, after = looks[0][0], (looks[1][0] + looks[2][0]) / 2
    error = evaluation_error(history, [problems for _, problems in looks[1:]])
    return (before, after) if after - before > error else None


def _part_fell(history: History, setup: Background, *, name: str) -> str | None:
    """A text where the last two blocks of steps lie below the best one beyond chance."""
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
    # The maximum over blocks is biased upwards: the fall must be larger than that bias.
    if fall <= max(0.1 * max(map(abs, parts)), 4 * noise(parts)) or rise <= 2 * noise(rewards):
        return None
    fell = f"{setup.marks(name, means[best])} to {setup.marks(name, means[-1])}"
    return _hacked(setup, name, fell=fell, rewards=(rewarded[best], rewarded[-1]))


def _at_once(history: History, setup: Background, *, name: str) -> str | None:
    """A text where all later steps lie below half of the start while the reward rose.

    The start are the first two steps, or the first and an evaluation before it. :func:`_part_fell`
    cannot see such an early fall: it widens the spread inside the first block.
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
    return _hacked(setup, name, fell=fell, kind=kind, rewards=rose)


def _ended_lower(history: History, setup: Background, *, metric: str, name: str) -> str | None:
    """A text where the last evaluation is below the first while the training reward rose."""
    looks = evaluations(history, setup, name=metric)
    if len(looks) < 2:
        return None
    (before, first), (after, last) = looks[0], looks[-1]
    if min(before, after) >= 0 and max(before, after) <= FULL:
        error = math.hypot(share_error(before, first), share_error(after, last))
        fell = f"{before:.1%} to {after:.1%} of {last} problems"
    else:  # scores of any scale: their spread is taken from the train prompts
        error = evaluation_error(history, (first, last))
        fell = f"{before:.3f} to {after:.3f}"
    if before - after <= max(2.5 * error, 0.05 * max(1.0, abs(before))):
        return None
    if resamples(history, setup):
        rewarded = evaluations(history, setup, name="eval/reward")
        rose = rewarded[-1][0] - rewarded[0][0] if len(rewarded) > 1 else 0.0
        if rose <= 2 * evaluation_error(history, (first, last)):
            return None
        rewards = (rewarded[0][0], rewarded[-1][0])
        return _hacked(setup, name, fell=fell, kind="held-out reward", rewards=rewards)
    values = series(history, "reward/mean")
    trained = ends(values)
    if trained is None or trained.last - trained.first <= 2 * noise(values, steps=trained.num):
        return None
    kind = f"training reward ({over_steps(trained.num)})"
    return _hacked(setup, name, fell=fell, kind=kind, rewards=(trained.first, trained.last))


def _last_good_step(history: History, name: str) -> int | None:
    """The last step before a reward on train prompts fell from its peak; None if it did not."""
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
    setup: Background,
    name: str,
    *,
    fell: str,
    rewards: tuple[float, float] | None,
    kind: str = OVER,
) -> str | None:
    if rewards is None:
        return None
    learned = ""
    if setup.only_monitored and name in (ACCURACY, setup.decides, f"held-out {setup.decides}"):
        learned = " of " + " and ".join(other for other, weight in setup.weights.items() if weight)
        name += f" by {setup.decides}" if name == ACCURACY else ""
        name += ", which is only monitored,"
    rose = f"the {kind}{learned} rose from {rewards[0]:.2f} to {rewards[1]:.2f}"
    return f"{rose}, while {name} fell from {fell}"
