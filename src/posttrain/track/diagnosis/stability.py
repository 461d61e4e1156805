"""The rules about training itself: whether policy, critic and engine stay in step.

And those about sft and reward: demonstrations learned by heart, scores that follow length.
"""

from __future__ import annotations

import math
import statistics

from posttrain.track.diagnosis.history import (
    AGREE,
    WINDOW,
    Background,
    History,
    Seen,
    mostly,
    noise,
    progress,
    scaled,
    series,
    solved,
)


def entropy_collapse(history: History, setup: Background) -> Seen | None:
    """objective/entropy is below a tenth of its start, or 0.01, with under 80 % right; where there
    are groups, 90 % of them agree in 4 of 5 steps: while they differ, the policy explores.
    """
    values = series(history, "objective/entropy")
    if len(values) < 2 * WINDOW or solved(history, setup):
        return None
    start = statistics.fmean(values[:WINDOW])
    now = mostly(history, "objective/entropy", test=lambda value: value < max(0.1 * start, 0.01))
    if now is None:
        return None
    groups = bool(series(history[-WINDOW:], AGREE))
    if groups and mostly(history, AGREE, test=lambda share: share >= 0.9) is None:
        return None
    if groups and setup.keys.get("rl.dynamic_sampling") is False:
        change = "--rl.dynamic_sampling true"  # the change that helped most in docs/smollm2.md
    else:
        change = scaled(setup, "rl.entropy_coefficient", by=3) or _slower(setup)
    return Seen(f"entropy fell from {start:.2f} to {now:.3f} nats", change=change)


def kl_blow_up(history: History, setup: Background) -> Seen | None:
    """objective/kl is above 10 nats + 0.5 a token, or tripled in 5 steps from a quarter of that."""
    values, lengths = series(history, "objective/kl"), series(history, "rollout/length")
    if len(values) < WINDOW or not lengths:
        return None
    bound = 10 + 0.5 * statistics.fmean(lengths[-WINDOW:])
    far = mostly(history, "objective/kl", test=lambda value: value > bound)
    if far is not None:
        text = f"KL to the reference is {far:.0f} nats a sequence, beyond {bound:.0f}"
        return Seen(text, change=_slower(setup))
    if len(values) < 3 * WINDOW:  # the KL starts near 0, so early growth by any factor means little
        return None
    before = statistics.fmean(values[-2 * WINDOW : -WINDOW])
    fast = mostly(history, "objective/kl", test=lambda value: value > max(3 * before, bound / 4))
    if fast is None:
        return None
    text = f"KL to the reference went from {before:.1f} to {fast:.1f} nats in {WINDOW} steps"
    return Seen(text, change=_slower(setup))


def clip_fraction_near_one(history: History, setup: Background) -> Seen | None:
    """policy/clip_fraction is above 0.5 in 4 of 5 steps."""
    share = mostly(history, "policy/clip_fraction", test=lambda value: value > 0.5)
    if share is None:
        return None
    return Seen(f"{share:.0%} of the tokens are clipped", change=_slower(setup))


def length_explosion(history: History, setup: Background) -> Seen | None:
    """rollout/length doubled in 50 steps while what decides did not rise, or grew fourfold."""
    lengths = series(history[-50:], "rollout/length")
    if len(lengths) < 2 * WINDOW:
        return None
    start = statistics.fmean(lengths[:WINDOW])
    now = mostly(history, "rollout/length", test=lambda value: value > max(2 * start, start + 8))
    if now is None:
        return None
    decides = progress(history[-50:], setup)
    risen = decides is None or decides[1] > decides[0] + 0.05
    if risen and now < 4 * start:
        return None
    text = f"completions grew from {start:.0f} to {now:.0f} tokens in {len(lengths)} steps"
    return Seen(text, change="--rl.missing_end_penalty 0.5")


def steps_skipped(history: History, setup: Background) -> Seen | None:
    """train/skipped is above 0 in 2 of 5 steps."""
    lately = series(history, "train/skipped")[-WINDOW:]
    ill = sum(count > 0 for count in lately)
    if len(lately) < WINDOW or ill < 2:
        return None
    text = f"in {ill} of {WINDOW} steps loss or gradient was not finite: nothing was changed"
    return Seen(text, change=_slower(setup))


def critic_worse_than_mean(history: History, setup: Background) -> Seen | None:
    """value/explained_variance is at most 0 in 8 of 10 steps, 10 steps after the warm-up."""
    name, steps = "value/explained_variance", 2 * WINDOW
    if len(series(history, name)) < setup.critic_warmup + 2 * steps or solved(history, setup):
        return None
    if not any(series(history[-steps:], "reward/std")):
        return None  # returns without variance have no explained variance
    share = mostly(history, name, test=lambda value: value <= 0, steps=steps)
    if share is None:
        return None
    change = scaled(setup, "rl.critic.learning_rate", by=0.3)
    return Seen(f"the critic explains {share:.0%} of the returns' variance", change=change)


def drift(history: History, setup: Background) -> Seen | None:
    """mismatch/mean is above what rounding explains, or above a third of that and 5 × its start,
    or above a 25th of that and 20 × what it was in the first step.
    """
    values = series(history, "mismatch/mean")
    if len(values) < WINDOW:
        return None
    start = statistics.fmean(values[:WINDOW])
    bound = min(setup.rounding, max(setup.rounding / 3, 5 * start))
    # In the first step engine and trainer have equal weights: the mismatch is rounding.
    bound = min(bound, max(setup.rounding / 25, 20 * values[0]))
    now = mostly(history, "mismatch/mean", test=lambda value: value > bound)
    if now is None:
        return None
    text = f"engine and trainer disagree by {now:.2g} nats a token"
    if now > 5 * values[0] + noise(values):
        return Seen(f"{text}, from {values[0]:.2g} in the first step", case="it grows")
    return Seen(f"{text} (rounding explains {setup.rounding:g})", case="from the first step on")


def _slower(setup: Background) -> str:
    return scaled(setup, "rl.learning_rate", by=0.3)


FOLLOWS = 0.7  # a correlation of 0.7: length explains half of the variance of the scores
SURE = 2.6  # standard deviations of Fisher's z that are significant


def sft_memorises(history: History, setup: Background) -> Seen | None:
    """test/loss was a tenth above its minimum in the last two evaluations, but train loss fell."""
    if setup.keys.get("sft.result") == "best":
        return None  # the result is the best model, from before the overfitting
    indices = [
        at for at, record in enumerate(history) if math.isfinite(record.get("test/loss", math.nan))
    ]
    if len(indices) < 3:
        return None
    best = min(indices, key=lambda at: history[at]["test/loss"])
    low = history[best]["test/loss"]
    lately = min(history[at]["test/loss"] for at in indices[-2:])
    near = series(history[max(0, best + 1 - WINDOW) : best + 1], "loss/total")
    now = series(history, "loss/total")[-WINDOW:]
    if lately <= max(1.1 * low, low + 0.01) or not near or not now:
        return None
    if statistics.fmean(now) >= statistics.fmean(near):
        return None
    step = int(history[best].get("step", best + 1))
    epoch = math.ceil(step / setup.steps_per_epoch) if setup.steps_per_epoch else 0
    when = f"in epoch {epoch} (step {step})" if epoch else f"at step {step}"
    text = (
        f"the held-out loss was {low:.3f} {when} and is {history[indices[-1]]['test/loss']:.3f} "
        f"now, while the train loss fell from {statistics.fmean(near):.3f} to "
        f"{statistics.fmean(now):.3f}"
    )
    key, value = ("epochs", epoch) if epoch else ("steps", step)
    return Seen(text, change=f"--sft.{key} {value}" if epoch or "sft.steps" in setup.keys else "")


def score_follows_length(history: History, setup: Background) -> Seen | None:
    """verdict/length_correlation is above 0.7 or below −0.7, and surely so for so many pairs."""
    found, pairs = series(history, "verdict/length_correlation"), series(history, "verdict/pairs")
    if not found or not pairs:
        return None
    correlation, count = found[-1], 2 * pairs[-1]
    bounded = min(abs(correlation), 1 - 1e-9)
    if bounded < FOLLOWS or count <= 3 or math.atanh(bounded) * math.sqrt(count - 3) < SURE:
        return None
    longer = "longer" if correlation > 0 else "shorter"
    text = f"the score of held-out completions follows their length (correlation {correlation:+.2f}"
    return Seen(f"{text} over {pairs[-1]:.0f} pairs): {longer} is better", case=longer)
