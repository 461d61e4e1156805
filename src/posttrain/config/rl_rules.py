"""Rules of ``[rl]``; see :mod:`posttrain.config.recipe_rules`."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.config.resolved import RlSection
from posttrain.config.specs import engine_table
from posttrain.registry import look_up


def optimiser_steps(rl: RlSection) -> int:
    """Optimiser steps for each batch of rollouts."""
    return rl.epochs * rl.minibatches


def baseline_of_gradients(rl: RlSection) -> str | None:
    """optimal_baseline needs gradient norms, which only the walk-through computes."""
    from posttrain.config.piece_facts import advantage_needs

    if "score_norms" in advantage_needs(rl):
        return (
            f"rl.advantage: {rl.advantage['name']!r} needs the gradient norm of every sequence, "
            "which only posttrain walkthrough computes; use leave_one_out or moving_baseline"
        )
    return None


def group_of_one(rl: RlSection) -> str | None:
    """An advantage that compares the completions of a prompt needs as many as it compares."""
    from posttrain.algorithms.advantages import without_siblings
    from posttrain.config.piece_facts import min_group_size

    least = min_group_size(rl)
    if rl.group_size < least:
        *others, last = without_siblings()
        return (
            f"rl.group_size: {rl.group_size}, but advantage {rl.advantage['name']!r} compares the "
            f"completions of a prompt, {least} at least; set rl.group_size to {least} or more, or "
            f"rl.advantage to one that compares none: {', '.join(others)} or {last}"
        )
    return None


def band_of_nothing(rl: RlSection) -> str | None:
    """curriculum.low is below curriculum.high."""
    band = rl.curriculum
    if band is not None and band.low >= band.high:
        return f"rl.curriculum.low: {band.low:g} is not below high = {band.high:g}; lower it"
    return None


def uneven_minibatches(rl: RlSection) -> str | None:
    """prompts_per_step × group_size can be divided by minibatches."""
    rollouts = rl.prompts_per_step * rl.group_size
    batch = f"{rl.prompts_per_step} prompts × {rl.group_size} completions = {rollouts} rollouts"
    if rl.minibatches > rollouts:
        return f"rl.minibatches: {rl.minibatches}, but {batch}; set it to {rollouts} or less"
    if rollouts % rl.minibatches:
        fits = [size for size in range(1, rollouts + 1) if rollouts % size == 0]
        near = sorted(sorted(fits, key=lambda size: abs(size - rl.minibatches))[:2])
        return (
            f"rl.minibatches: {rl.minibatches} does not divide {batch}; "
            f"{' and '.join(map(str, near))} do"
        )
    return None


def greedy_sampling(rl: RlSection) -> str | None:
    """RL samples: at temperature 0, or with top_k = 1, nothing is explored."""
    if rl.top_k == 1:
        return (
            "rl.top_k: 1 is greedy: all completions of a prompt are the same and nothing can be "
            "learned; set it above 1, or to 0 (off)"
        )
    if rl.temperature < 1e-6:
        return (
            f"rl.temperature: {rl.temperature:g} is greedy: all completions of a prompt are the "
            "same and nothing can be learned; set it higher (1.0 is the model's own distribution)"
        )
    return None


def engine_cannot_truncate(rl: RlSection) -> str | None:
    """top_k and top_p need an engine that reports log-probs of the distribution really sampled."""
    if rl.engine is None or (rl.top_k == 0 and rl.top_p == 1):
        return None
    name = rl.engine["name"]
    engine = look_up(name, engine_table(), kind="rl.engine")
    if getattr(engine, "reports_truncated_logprobs", True):
        return None
    key = "rl.top_k" if rl.top_k else "rl.top_p"
    return (
        f"{key}: engine {name!r} reports log-probs of the whole distribution, not of the one "
        'truncated by top_k or top_p; switch both off (0 and 1.0), or set rl.engine to "native"'
    )


def buffer_above_limit(rl: RlSection) -> str | None:
    """overlong_buffer lies within max_new_tokens."""
    if rl.overlong_buffer > rl.max_new_tokens:
        return (
            f"rl.overlong_buffer: {rl.overlong_buffer} tokens, but completions end at "
            f"rl.max_new_tokens = {rl.max_new_tokens}; set it to less"
        )
    return None


def rl_warmup_too_long(rl: RlSection) -> str | None:
    """rl.warmup_steps above the optimiser steps of the stage never reach the learning rate."""
    total = rl.steps * optimiser_steps(rl)
    if rl.warmup_steps > total:
        have = f"{total} optimiser step{'s' if total != 1 else ''}"
        return (
            f"rl.warmup_steps: {rl.warmup_steps}, but rl takes {have}: the peak is not reached; "
            "set it to less"
        )
    return None


def resampling_nothing(rl: RlSection) -> str | None:
    """dynamic_sampling needs groups that can differ."""
    if rl.dynamic_sampling and rl.group_size < 2:
        return (
            "rl.dynamic_sampling: a group of 1 always has equal rewards, so all would be thrown "
            "away; set rl.group_size to 2 or more, or rl.dynamic_sampling to false"
        )
    return None


def nothing_to_evaluate(rl: RlSection) -> str | None:
    """evaluate_every needs test problems."""
    if rl.evaluate_every and not rl.evaluate_problems:
        return "rl.evaluate_problems: 0; set it to 1 or more, or rl.evaluate_every to 0"
    return None


def penalty_of_one_step(rl: RlSection) -> str | None:
    """penalty_target needs a coefficient above 0, and more than one optimiser step per batch."""
    if rl.penalty_target is not None and rl.loss.get("coefficient") == 0:
        return (
            "rl.loss.coefficient: 0 stays 0 when it is doubled or halved towards "
            "rl.penalty_target; set it above 0"
        )
    if rl.penalty_target is not None and optimiser_steps(rl) == 1:
        return (
            "rl.penalty_target: after one optimiser step per batch the policy is still the old one "
            "when it is measured, so the penalty would only shrink; set rl.epochs or "
            "rl.minibatches above 1"
        )
    return None


def naive_off_policy(rl: RlSection) -> str | None:
    """The naive loss knows no old policy, so it is right for one optimiser step per batch only."""
    from posttrain.config.piece_facts import loss_facts

    if optimiser_steps(rl) > 1 and loss_facts(rl).optimiser_steps == "one":
        return (
            f"rl.loss: {rl.loss['name']!r} is right for the first optimiser step of a batch, and "
            f"there are {optimiser_steps(rl)}; set rl.loss to unclipped or clipped, or take one "
            "step"
        )
    return None


def held_back_by_nothing(rl: RlSection) -> str | None:
    """kl_cov compares with the old policy, which one optimiser step per batch never leaves."""
    from posttrain.config.piece_facts import loss_facts

    if optimiser_steps(rl) == 1 and loss_facts(rl).optimiser_steps == "several":
        return (
            f"rl.loss: {rl.loss['name']!r} holds tokens back once π has left the old policy, and "
            "with one optimiser step per batch it never has; set rl.epochs or rl.minibatches "
            "above 1"
        )
    return None


def warmup_of_the_whole_run(rl: RlSection) -> str | None:
    """A critic learns alone for some steps of the stage, never for all of them."""
    if rl.critic is not None and rl.critic.warmup_steps >= rl.steps:
        return (
            f"rl.critic.warmup_steps: {rl.critic.warmup_steps} of {rl.steps} steps, so the policy "
            "would never learn; set it to less than rl.steps"
        )
    return None


def lag_of_the_whole_run(rl: RlSection) -> str | None:
    """max_lag is less than the steps of the stage."""
    if rl.max_lag and rl.max_lag >= rl.steps:
        return (
            f"rl.max_lag: {rl.max_lag} of {rl.steps} steps, so every batch would be sampled before "
            "the policy has learned anything; set it to less than rl.steps"
        )
    return None


def parts_of_completions(rl: RlSection) -> str | None:
    """Partial rollouts are as old as max_lag allows, of equal parts, and all sampled alike."""
    if rl.partial > rl.max_lag + 1:
        return (
            f"rl.partial: over {rl.partial} updates a completion grows {rl.partial - 1} old, and "
            f"rl.max_lag is {rl.max_lag}; set rl.max_lag to {rl.partial - 1}, or to {rl.partial} "
            "to sample while the learner trains"
        )
    if rl.max_new_tokens % rl.partial:
        return (
            f"rl.partial: {rl.partial} does not divide rl.max_new_tokens, {rl.max_new_tokens}; "
            f"set that to {rl.max_new_tokens // rl.partial * rl.partial or rl.partial}"
        )
    if rl.partial > 1 and rl.curriculum is not None:
        return (
            "rl.partial: a curriculum draws prompts by the completions before, and these are not "
            "whole yet; set rl.partial to 1, or drop rl.curriculum"
        )
    if rl.partial > 1 and rl.dynamic_sampling:
        return (
            "rl.partial: dynamic_sampling wants whole completions before it draws other prompts; "
            "set rl.partial to 1, or rl.dynamic_sampling to false"
        )
    return None


def greedy_beside_parts(rl: RlSection) -> str | None:
    """A greedy baseline is of the weights that sampled: those of partial rollouts are several."""
    from posttrain.config.piece_facts import wants_greedy

    if rl.partial > 1 and wants_greedy(rl):
        return (
            f"rl.partial: advantage {rl.advantage['name']!r} compares with a greedy completion of "
            "the same weights, and a partial rollout has several; set rl.partial to 1"
        )
    return None


def stale_without_correction(rl: RlSection) -> str | None:
    """Rollouts that run ahead come from an older policy, which a correction makes up for."""
    if rl.max_lag and rl.correction["name"] == "none":
        return (
            "rl.correction: none, but with rl.max_lag the rollouts come from an older policy and "
            'are learned as if they did not; use "truncated" (the default with max_lag) or "masked"'
        )
    return None


def loss_without_gradient(rl: RlSection) -> str | None:
    """k1 in the loss has no gradient on average, only noise, unless it is weighted."""
    kl = rl.kl
    if (kl.placement, kl.estimator, kl.direction) == ("loss", "k1", "reverse") and not kl.weighted:
        return (
            "rl.kl.estimator: k1 in the loss has gradient 0 on average; use k2 or k3, or set "
            "rl.kl.weighted to true"
        )
    return None


RL_RULES: list[Callable[[RlSection], str | None]] = [
    band_of_nothing,
    uneven_minibatches,
    greedy_sampling,
    buffer_above_limit,
    resampling_nothing,
    nothing_to_evaluate,
    warmup_of_the_whole_run,
    lag_of_the_whole_run,
    parts_of_completions,
]

# Checked last: facts of pieces and engines load torch.
PIECE_RULES: list[Callable[[RlSection], str | None]] = [
    baseline_of_gradients,
    group_of_one,
    penalty_of_one_step,
    greedy_beside_parts,
]
ENGINE_RULES: list[Callable[[RlSection], str | None]] = [engine_cannot_truncate]

RL_CAUTIONS: list[Callable[[RlSection], str | None]] = [
    rl_warmup_too_long,
    naive_off_policy,
    held_back_by_nothing,
    loss_without_gradient,
    stale_without_correction,
]
