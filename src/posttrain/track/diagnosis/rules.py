"""The rules: each reads the steps so far and says what is wrong, or None while nothing is."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.track.diagnosis.history import (
    WINDOW,
    History,
    Setup,
    level,
    mostly,
    noise,
    series,
    solved,
)
from posttrain.track.diagnosis.rewards import format_learned_accuracy_flat, hacking

Check = Callable[[History, Setup], str | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check, whose docstring says what it sees; what that means; and what to do."""

    check: Check
    means: str
    remedy: str


def no_signal(history: History, setup: Setup) -> str | None:
    """At least 99 % of the groups agree in 4 of 5 steps; with single completions, all rewards."""
    agreed = mostly(history, "rollout/groups_without_signal", test=lambda share: share >= 0.99)
    if agreed is None:
        alone = not series(history[-WINDOW:], "rollout/groups_without_signal")
        if not alone or mostly(history, "reward/std", test=lambda spread: spread == 0) is None:
            return None
    if mostly(history, "reward/invalid", test=lambda share: share == 1) is not None:
        return None  # broken graders agree about nothing: grader_failing speaks of them
    value = level(history, setup)
    verdict = "each prompt is always right or always wrong"
    if value <= 0.05 or value >= 0.95:
        verdict = "all wrong" if value <= 0.05 else "all right"
    what = "all rewards are equal" if agreed is None else f"{agreed:.0%} of groups agree"
    name = setup.decides or "reward"
    return f"nothing to learn from: {what}: {verdict} ({name} {value:.2f})"


def entropy_collapse(history: History, setup: Setup) -> str | None:
    """objective/entropy is below a tenth of its start, or 0.01, with under 80 % right."""
    values = series(history, "objective/entropy")
    if len(values) < 2 * WINDOW or solved(history, setup):
        return None
    start = statistics.fmean(values[:WINDOW])
    now = mostly(history, "objective/entropy", test=lambda value: value < max(0.1 * start, 0.01))
    return None if now is None else f"entropy fell from {start:.2f} to {now:.3f} nats"


def kl_blow_up(history: History, setup: Setup) -> str | None:
    """objective/kl is above 10 nats + 0.5 a token, or tripled in 5 steps from a quarter of that."""
    values, lengths = series(history, "objective/kl"), series(history, "rollout/length")
    if len(values) < WINDOW or not lengths:
        return None
    bound = 10 + 0.5 * statistics.fmean(lengths[-WINDOW:])
    far = mostly(history, "objective/kl", test=lambda value: value > bound)
    if far is not None:
        return f"KL to the reference is {far:.0f} nats a sequence, beyond {bound:.0f}"
    if len(values) < 3 * WINDOW:  # it starts at 0: early growth is a multiple of next to nothing
        return None
    before = statistics.fmean(values[-2 * WINDOW : -WINDOW])
    fast = mostly(history, "objective/kl", test=lambda value: value > max(3 * before, bound / 4))
    if fast is None:
        return None
    return f"KL to the reference went from {before:.1f} to {fast:.1f} nats in {WINDOW} steps"


def clip_fraction_near_one(history: History, setup: Setup) -> str | None:
    """policy/clip_fraction is above 0.5 in 4 of 5 steps."""
    share = mostly(history, "policy/clip_fraction", test=lambda value: value > 0.5)
    return None if share is None else f"{share:.0%} of the tokens are clipped"


def length_explosion(history: History, setup: Setup) -> str | None:
    """rollout/length doubled in 50 steps while what decides did not rise, or grew fourfold."""
    lengths = series(history[-50:], "rollout/length")
    if len(lengths) < 2 * WINDOW:
        return None
    start = statistics.fmean(lengths[:WINDOW])
    now = mostly(history, "rollout/length", test=lambda value: value > max(2 * start, start + 8))
    if now is None:
        return None
    decides = series(history[-50:], f"reward/part/{setup.decides}")
    risen = not decides or (
        statistics.fmean(decides[-WINDOW:]) > statistics.fmean(decides[:WINDOW]) + 0.05
    )
    if risen and now < 4 * start:
        return None
    return f"completions grew from {start:.0f} to {now:.0f} tokens in {len(lengths)} steps"


def all_truncated(history: History, setup: Setup) -> str | None:
    """rollout/truncated is above 0.9 in 4 of 5 steps."""
    share = mostly(history, "rollout/truncated", test=lambda value: value > 0.9)
    return None if share is None else f"{share:.0%} of the completions are cut by the length limit"


def grader_failing(history: History, setup: Setup) -> str | None:
    """reward/invalid is above 0 in 4 of 5 steps."""
    share = mostly(history, "reward/invalid", test=lambda value: value > 0)
    if share is None:
        return None
    before = series(history, "reward/invalid")[-3 * WINDOW : -WINDOW]
    rising = ", and rising" if before and share > 2 * statistics.fmean(before) else ""
    return f"the grader broke on {share:.1%} of the completions{rising}"


def steps_skipped(history: History, setup: Setup) -> str | None:
    """train/skipped is above 0 in 2 of 5 steps."""
    lately = series(history, "train/skipped")[-WINDOW:]
    ill = sum(count > 0 for count in lately)
    if len(lately) < WINDOW or ill < 2:
        return None
    return f"in {ill} of {WINDOW} steps loss or gradient was not finite: nothing was changed"


def critic_worse_than_mean(history: History, setup: Setup) -> str | None:
    """value/explained_variance is at most 0 in 8 of 10 steps, 10 steps after the warm-up."""
    name, steps = "value/explained_variance", 2 * WINDOW
    if len(series(history, name)) < setup.critic_warmup + 2 * steps or solved(history, setup):
        return None
    if not any(series(history[-steps:], "reward/std")):
        return None  # nothing varies: there is nothing to explain
    share = mostly(history, name, test=lambda value: value <= 0, steps=steps)
    return None if share is None else f"the critic explains {share:.0%} of the returns' variance"


def drift(history: History, setup: Setup) -> str | None:
    """mismatch/mean is above what rounding explains, or above a third of that and 5 × its start."""
    values = series(history, "mismatch/mean")
    if len(values) < WINDOW:
        return None
    start = statistics.fmean(values[:WINDOW])
    bound = min(setup.rounding, max(setup.rounding / 3, 5 * start))
    now = mostly(history, "mismatch/mean", test=lambda value: value > bound)
    if now is None:
        return None
    usual = f"rounding explains {setup.rounding:g}"
    rising = f", from {start:.2g}" if now > 2 * start + noise(values) else ""
    return f"engine and trainer disagree by {now:.2g} nats a token{rising} ({usual})"


RULES: dict[str, Rule] = {
    "no_signal": Rule(
        check=no_signal,
        means="A group that agrees has no advantage: the gradient is zero, and time is wasted.",
        remedy="All wrong: take easier prompts, warm up with [sft], give partial credit in "
        "[rewards], or raise rl.group_size. All right: stop, or take harder prompts.",
    ),
    "entropy_collapse": Rule(
        check=entropy_collapse,
        means="The policy has settled on one answer before it was right, and explores no more.",
        remedy="Raise rl.entropy_coefficient, lower rl.learning_rate, or take more prompts.",
    ),
    "kl_blow_up": Rule(
        check=kl_blow_up,
        means="The policy runs away from the reference and forgets what it could do.",
        remedy="Lower rl.learning_rate, raise rl.kl.coefficient, or steer with rl.kl.target.",
    ),
    "clip_fraction_near_one": Rule(
        check=clip_fraction_near_one,
        means="Most tokens have moved past the clip: the batch is stale, its gradient nearly gone.",
        remedy="Lower rl.learning_rate, rl.epochs or rl.minibatches, or set rl.kl_stop.",
    ),
    "length_explosion": Rule(
        check=length_explosion,
        means="Length is rewarded by itself, or the end of an answer has been unlearned.",
        remedy="Set rl.overlong_buffer or rl.missing_end_penalty, add the reward length, or choose "
        'rl.weights = "token_mean"; look at what the long rollouts say.',
    ),
    "all_truncated": Rule(
        check=all_truncated,
        means="No completion comes to its end, so what is graded is a fragment.",
        remedy="Raise rl.max_new_tokens, or warm up with [sft] so that the model learns to end.",
    ),
    "format_learned_accuracy_flat": Rule(
        check=format_learned_accuracy_flat,
        means="The easy part of the reward is earned, and the part that matters is not learned.",
        remedy="Lower the weight of the easy part in [rewards], take easier prompts, or raise "
        "rl.group_size until some completions are right.",
    ),
    "hacking": Rule(
        check=hacking,
        means="The policy earns more reward by something else than what the reward stands for.",
        remedy="Read the best-rewarded rollouts and mend the reward; until then raise "
        "rl.kl.coefficient, lower rl.steps, or keep a checkpoint from before (rl.save_every).",
    ),
    "grader_failing": Rule(
        check=grader_failing,
        means="Scores are missing. What the grader cannot read is left out, and so never learned.",
        remedy="Read `reason` in the rollouts and mend the reward; rl.max_invalid stops the run.",
    ),
    "steps_skipped": Rule(
        check=steps_skipped,
        means="A step whose loss or gradient is not finite is skipped: its batch taught nothing.",
        remedy="Scale the rewards to about 1, or lower rl.learning_rate; the batches are kept in "
        "rl/skipped.",
    ),
    "critic_worse_than_mean": Rule(
        check=critic_worse_than_mean,
        means="Advantages are noisier than without a critic.",
        remedy="Lower rl.critic.learning_rate, raise rl.critic.warmup_steps, or take an algorithm "
        "without a critic.",
    ),
    "drift": Rule(
        check=drift,
        means="The tokens do not come from the policy that is trained, so ratios are wrong.",
        remedy='Set rl.correction = "truncated", use rl.engine = "native", or the same precision '
        "on both sides; check that new weights reach the engine.",
    ),
}
