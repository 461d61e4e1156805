"""The rules about sft and reward: demonstrations learned by heart, scores that follow length."""

from __future__ import annotations

import math
import statistics

from posttrain.track.diagnosis.history import WINDOW, Background, History, Seen, series

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
