"""The rules about results: train against held-out, before against after."""

from __future__ import annotations

import math
import statistics

from posttrain.track.diagnosis.history import (
    AGREE,
    FULL,
    WINDOW,
    Background,
    History,
    Seen,
    evaluation_error,
    evaluations,
    gap,
    noise,
    progress,
    resamples,
    scaled,
    series,
    sft_scaled,
    share_error,
)
from posttrain.track.printable import counted
from posttrain.track.shown import over_steps

LONG = 200  # steps after which a run without progress is reported before its end
MANY_PASSES = 100
CLEARLY_LESS = -2.5  # errors by which held-out problems have fallen
HARDLY = 0.02  # nats a sequence: a policy this close to the reference has hardly moved


def memorised(history: History, setup: Background) -> Seen | None:
    """A reward is above 0.9 on train prompts, and on held-out ones lower by 0.1 and by 2.5 times
    what chance explains.
    """
    found = gap(history, setup)
    if found is None or not found.clear or len(series(history, "reward/mean")) < WINDOW:
        return None
    start = statistics.fmean(series(history, f"reward/part/{found.name}")[:WINDOW])
    if not setup.warmed_up or start < 0.9:
        return Seen(found.text, case="in rl", change=scaled(setup, "rl.steps", by=0.5))
    case = "by [sft], on the prompts of rl" if setup.shared_prompts else "by [sft]"
    return Seen(found.text, case=case, change=sft_scaled(setup, by=0.3))


def nothing_learned(history: History, setup: Background) -> Seen | None:
    """After 200 steps, or at the end of at least 10, neither the training reward nor held-out
    problems have risen beyond chance; with dynamic sampling, where the training reward cannot show
    it, held-out problems alone count, given two evaluations. At the end of any number of steps,
    where held-out problems have fallen by 2.5 times what chance explains.
    """
    return _unmoved(history, setup, least=LONG)


def nothing_learned_at_end(history: History, setup: Background) -> Seen | None:
    """:func:`nothing_learned` at the end of rl; the stage eval decides where it follows."""
    if setup.stage == "rl" and "eval" in setup.stages:
        return None
    fell = _held_out(history, setup)[2] < CLEARLY_LESS
    return _unmoved(history, setup, least=1 if fell else 2 * WINDOW)


def _unmoved(history: History, setup: Background, *, least: int) -> Seen | None:
    rewards = series(history, "reward/mean")
    agreed = series(history, AGREE)
    found = gap(history, setup)
    if len(rewards) < least or (found is not None and found.clear):
        return None  # where the gap is clear, the rule memorised applies
    what, span, rise = _held_out(history, setup)
    steps = f"in {counted(len(rewards), 'step')}"
    worse, all_agree = rise < CLEARLY_LESS, bool(agreed) and statistics.median(agreed) >= 0.99
    if rise > 2 or (all_agree and not worse):
        return None  # where all groups agree, the rule no_signal applies
    alone = f"{steps} {what} went {span}"
    if resamples(history, setup):
        return Seen(alone, *_reason(history, setup, fell=worse)) if what else None
    count = max(WINDOW, len(rewards) // 5)
    first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
    error = noise(rewards, steps=count)
    if last - first > 2 * error:
        return None
    if len(rewards) < WINDOW:  # too few to know what chance explains
        return Seen(alone, *_reason(history, setup, fell=worse))
    text = f"{steps} the training reward went from {first:.3f} to {last:.3f} ({over_steps(count)}; "
    text += f"chance explains ±{2 * error:.3f})" + (f", and {what} {span}" if what else "")
    fell = first - last > 3 * error and first - last > 0.02
    return Seen(text, *_reason(history, setup, fell=fell or worse))


def _held_out(history: History, setup: Background) -> tuple[str, str, float]:
    """The held-out metric, its course in words, and its change in standard errors."""
    metrics = {"eval/accuracy": "accuracy", "eval/reward": "reward"}
    name = next((name for name in metrics if series(history, name)), None)
    looks = evaluations(history, setup, name=name) if name is not None else []
    if name is None or len(looks) < 2:
        return "", "", 0.0
    (before, first), (after, last) = looks[0], looks[-1]
    if name == "eval/accuracy":
        error = math.hypot(share_error(before, first), share_error(after, last))
        what, span = "held-out accuracy", f"from {before:.1%} to {after:.1%} of {last} problems"
    else:  # scores of any scale: their spread is taken from the train prompts
        error = evaluation_error(history, (first, last))
        what, span = "the held-out reward", f"from {before:.3f} to {after:.3f}"
    return what, span, (after - before) / error if error > 0 else 0.0


def _reason(history: History, setup: Background, *, fell: bool) -> tuple[str, str]:
    """The likeliest reason that nothing was learned, and what to change."""
    setup = setup.learned_from
    kind = "eval" if resamples(history, setup) else "reward"
    right = series(history, f"{kind}/part/{setup.decides}")
    if fell:
        return "it fell", scaled(setup, "rl.learning_rate", by=0.3)
    if right and 0.95 <= statistics.fmean(right) <= FULL:
        return "all was right before", ""
    if right and max(right) <= 0.02 and not setup.environment:  # whose scores may be below 0
        if setup.warmed_up:
            return "never right, after [sft]", sft_scaled(setup, by=2)
        return "never right", scaled(setup, "rl.group_size", by=2)
    moved = series(history, "objective/kl")[-WINDOW:]
    if moved and statistics.fmean(moved) < HARDLY:
        return "the policy hardly moved", scaled(setup, "rl.learning_rate", by=5)
    return "it moved, and not towards the reward", scaled(setup, "rl.prompts_per_step", by=2)


def many_passes(history: History, setup: Background) -> Seen | None:
    """Every train prompt was asked 100 times, and held-out problems do not show that it helps."""
    steps = history[-1].get("step", 0.0) if history else 0.0
    if not setup.num_prompts or not setup.prompts_per_step:
        return None
    passes = steps * setup.prompts_per_step / setup.num_prompts
    if passes < MANY_PASSES or _helps(history, setup):
        return None
    text = f"the {setup.num_prompts:,} train prompts have been gone through {passes:.0f} times"
    few = max(1, round(20 * setup.num_prompts / setup.prompts_per_step))
    return Seen(text, change=f"--rl.steps {few}")


def _helps(history: History, setup: Background) -> bool:
    """Whether held-out problems are right as often as train prompts, or else more than before."""
    if resamples(history, setup):
        found = progress(history, setup)
        return found is not None and found[1] > found[0] + 0.1
    train = series(history, f"reward/part/{setup.decides}")
    held_out = series(history, f"eval/part/{setup.decides}")
    return bool(train and held_out) and held_out[-1] > train[-1] - 0.1
