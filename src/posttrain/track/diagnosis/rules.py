"""The rules: each reads the steps so far and says what is wrong, or None while nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.track.diagnosis.groups import all_truncated, grader_failing, in_all, no_signal
from posttrain.track.diagnosis.history import Check
from posttrain.track.diagnosis.outcomes import (
    many_passes,
    memorised,
    nothing_learned,
    nothing_learned_at_end,
)
from posttrain.track.diagnosis.rewards import format_learned_accuracy_flat, hacking, hacking_at_end
from posttrain.track.diagnosis.stability import (
    clip_fraction_near_one,
    critic_worse_than_mean,
    drift,
    entropy_collapse,
    kl_blow_up,
    length_explosion,
    score_follows_length,
    sft_memorises,
    steps_skipped,
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check, whose docstring says what it sees; what that means; and what to do.

    ``remedies`` are by the case that the check names; "" where there is one alone. ``at_end`` is
    asked once the stage is over. ``stages`` are those whose numbers it reads: eval has those of rl,
    and its own verdict.
    """

    check: Check
    means: str
    remedies: Mapping[str, str]
    at_end: Check | None = None
    stages: tuple[str, ...] = ("rl",)


UNTRAINED = (
    'The model "tiny" has learned nothing yet, and a larger `rl.group_size` cannot help: warm it '
    "up with `[sft]` first, name a trained model"
)
KNOWN_BY_HEART = "The train prompts are known by heart"

RULES: dict[str, Rule] = {
    "no_signal": Rule(
        check=no_signal,
        at_end=in_all(no_signal),
        means="A group that agrees has no advantage: the gradient is zero, and time is wasted.",
        remedies={
            "all wrong": "Take easier prompts, warm up with `[sft]`, give partial credit in "
            "`[rewards]`, or raise `rl.group_size`.",
            "all wrong with random weights": f"{UNTRAINED}, or give partial credit in `[rewards]`.",
            "all wrong after [sft]": "Raise `sft.epochs` until some answers are right, take easier "
            "prompts, give partial credit in `[rewards]`, or raise `rl.group_size`.",
            "all right": "Held-out problems are right too: stop, or take harder prompts.",
            "all right, and held-out ones are not known": "Before you stop, ask held-out "
            "problems: add `[eval]`, or set `rl.evaluate_every`.",
            "all right on train prompts, and not on held-out ones": f"{KNOWN_BY_HEART}: give rl "
            "prompts that `[sft]` has not seen, take more of them, or lower `sft.epochs`.",
            "every answer gets the same": "Fix the reward: a better answer has to score more "
            "than a worse one.",
            "every episode scores 0": "Let the environment give partial credit, or rewards of "
            "turns; take easier prompts, warm up with `[sft]`, or raise `rl.group_size`. "
            "`posttrain play` shows what the policy does in it.",
            "every episode scores 0 with random weights": f"{UNTRAINED}, or let the environment "
            "give partial credit. `posttrain play` shows what the policy does in it.",
            "every episode scores 0 after [sft]": "Raise `sft.epochs` until some episodes score, "
            "let the environment give partial credit, or rewards of turns, take easier prompts, or "
            "raise `rl.group_size`. `posttrain play` shows what the policy does in it.",
            "every episode gets the same": "Fix the environment: a better episode has to score "
            "more than a worse one.",
            "each prompt is always right or always wrong": "Raise `rl.group_size` or "
            "`rl.temperature`, or take prompts of a difficulty in between.",
        },
    ),
    "entropy_collapse": Rule(
        check=entropy_collapse,
        means="The policy has settled on one answer before it was right, and no longer explores.",
        remedies={
            "": "Draw groups that agree again (`rl.dynamic_sampling = true`), take more prompts, "
            "raise `rl.entropy_coefficient`, or lower `rl.learning_rate`."
        },
    ),
    "kl_blow_up": Rule(
        check=kl_blow_up,
        means="The policy runs away from the reference and forgets what it could do.",
        remedies={
            "": "Lower `rl.learning_rate`, raise `rl.kl.coefficient`, or steer with `rl.kl.target`."
        },
    ),
    "clip_fraction_near_one": Rule(
        check=clip_fraction_near_one,
        means="Most tokens have moved past the clip: the batch is stale, its gradient nearly gone.",
        remedies={
            "": "Lower `rl.learning_rate`, `rl.epochs` or `rl.minibatches`, or set `rl.kl_stop`."
        },
    ),
    "length_explosion": Rule(
        check=length_explosion,
        means="Length is rewarded by itself, or the end of an answer has been unlearned.",
        remedies={
            "": "Set `rl.missing_end_penalty` or `rl.overlong_buffer`, add the reward length, or "
            'choose `rl.weights = "token_mean"`; look at what the long rollouts say.'
        },
    ),
    "all_truncated": Rule(
        check=all_truncated,
        at_end=in_all(all_truncated),
        means="No completion comes to its end, so what is graded is a fragment.",
        remedies={
            "without [sft]": "Raise `rl.max_new_tokens`, or warm up with `[sft]` so that the model "
            "learns to end.",
            "after [sft]": "Raise `rl.max_new_tokens`, or `sft.epochs` so that the model learns to "
            "end; the demonstrations may be longer than `rl.max_new_tokens`.",
        },
    ),
    "format_learned_accuracy_flat": Rule(
        check=format_learned_accuracy_flat,
        means="The easy part of the reward is earned, and the part that matters is not learned.",
        remedies={
            "": "Lower the weight of the easy part in `[rewards]`, take easier prompts, or raise "
            "`rl.group_size` until some completions are right.",
            "what decides has weight 0": "Nothing that is learned from depends on the answer: "
            "with weight 0 a reward is only monitored, and no other setting makes it rise.",
        },
    ),
    "hacking": Rule(
        check=hacking,
        at_end=hacking_at_end,
        stages=("rl", "eval"),
        means="The policy earns more reward by something other than what the reward stands for.",
        remedies={
            "": "Read the best-rewarded rollouts and fix the reward; until then raise "
            "`rl.kl.coefficient`, lower `rl.steps`, or keep a checkpoint from before "
            "(`rl.save_every`).",
            "what decides has weight 0": "What is learned from pays for worse answers: give the "
            "reward that is only monitored a weight in `[rewards]`, or fix the one that is "
            "learned from.",
        },
    ),
    "grader_failing": Rule(
        check=grader_failing,
        at_end=in_all(grader_failing),
        means="Scores are missing. What the grader cannot read is left out, and so never learned.",
        remedies={
            "": "Read `reason` in the rollouts and fix the reward; `rl.max_invalid` stops the run.",
            "environments": "Read `reason` in the rollouts and fix the environment, or give it "
            "what it lacks (`environment.seconds`, `environment.memory_mb`); `rl.max_invalid` "
            "stops the run.",
        },
    ),
    "steps_skipped": Rule(
        check=steps_skipped,
        means="A step whose loss or gradient is not finite is skipped: its batch taught nothing.",
        remedies={
            "": "Scale the rewards to about 1, or lower `rl.learning_rate`; the batches are kept "
            "in `rl/skipped`."
        },
    ),
    "critic_worse_than_mean": Rule(
        check=critic_worse_than_mean,
        means="Advantages are noisier than without a critic.",
        remedies={
            "": "Lower `rl.critic.learning_rate`, raise `rl.critic.warmup_steps`, or take an "
            "algorithm without a critic."
        },
    ),
    "drift": Rule(
        check=drift,
        means="The tokens do not come from the policy that is trained, so ratios are wrong.",
        remedies={
            "it grows": "New weights do not reach the engine: fix how it gets them, or use "
            '`rl.engine = "native"`; `posttrain check` tries it in its line *weights to engine*.',
            "from the first step on": 'Set `rl.correction = "truncated"`, the same precision on '
            'both sides, or `rl.engine = "native"`.',
        },
    ),
    "memorised": Rule(
        check=memorised,
        at_end=memorised,
        stages=("rl", "eval"),
        means="What was learned are these prompts, not the task: more steps will not help others.",
        remedies={
            "by [sft], on the prompts of rl": f"{KNOWN_BY_HEART} since `[sft]`, which rl goes "
            "through again: lower `sft.epochs`, give rl prompts that `[sft]` has not seen, or take "
            "more of them.",
            "by [sft]": f"{KNOWN_BY_HEART} since `[sft]`: lower `sft.epochs`, or take more and "
            "other prompts for rl.",
            "in rl": "Take more prompts, lower `rl.steps`, or raise `rl.kl.coefficient`.",
        },
    ),
    "nothing_learned": Rule(
        check=nothing_learned,
        at_end=nothing_learned_at_end,
        stages=("rl", "eval"),
        means="The run took its time, and the model is no better than before.",
        remedies={
            "never right": "No answer was right: take easier prompts, warm up with `[sft]`, or "
            "give partial credit in `[rewards]`.",
            "never right, after [sft]": "No answer was right: raise `sft.epochs` or give better "
            "demonstrations, take easier prompts, or give partial credit in `[rewards]`.",
            "all was right before": "There is nothing left to learn here: take harder prompts.",
            "the policy hardly moved": "It is as near to the reference as at the start: raise "
            "`rl.learning_rate`, or lower `rl.kl.coefficient`.",
            "it moved, and not towards the reward": "Raise `rl.prompts_per_step` or "
            "`rl.group_size` for a clearer gradient, `rl.steps`, or `rl.learning_rate`.",
            "it fell": "It is worse than before: lower `rl.learning_rate`, or raise "
            "`rl.kl.coefficient`.",
        },
    ),
    "many_passes": Rule(
        check=many_passes,
        means="Prompts that come again so often are learned by heart.",
        remedies={"": "Take more prompts, or lower `rl.steps`."},
    ),
    "sft_memorises": Rule(
        check=sft_memorises,
        at_end=sft_memorises,
        stages=("sft",),
        means="The demonstrations are learned by heart; what they have in common was learned "
        "before.",
        remedies={
            "": 'Lower `sft.epochs` to the best one, set `sft.result = "best"`, or give more '
            "demonstrations."
        },
    ),
    "score_follows_length": Rule(
        check=score_follows_length,
        at_end=score_follows_length,
        stages=("reward",),
        means="A policy that learns from this reward model learns how long to be.",
        remedies={
            "longer": "Give pairs in which the better answer is the shorter one as often; with "
            "this model, watch `rollout/length`, and set `rl.overlong_buffer` or a negative weight "
            "of the reward length.",
            "shorter": "Give pairs in which the better answer is the longer one as often; with "
            "this model, watch `rollout/length`.",
        },
    ),
}
