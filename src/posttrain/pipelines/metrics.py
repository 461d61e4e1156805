"""The numbers of one step, by the names that ``docs/metrics.md`` explains."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.algorithms.diagnostics import share_without_signal
from posttrain.algorithms.ops import keep
from posttrain.protocols import StepResult
from posttrain.types import Batch, Collected
from posttrain.types.marks import mean_parts

_NAMES = {
    "entropy": "objective/entropy",
    "approx_kl": "policy/approx_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "chosen": "policy/chosen",
    "ratio": "policy/ratio",
    "ratio_max": "policy/ratio_max",
    "ratio_variance": "policy/ratio_variance",
    "effective_sample_size": "policy/effective_sample_size",
    "kl": "policy/kl",
    "divergence": "teacher/divergence",
    "correction": "mismatch/correction",
    "mismatch": "mismatch/mean",
    "mismatch_max": "mismatch/max",
    "policy_loss": "loss/policy",
    "kl_loss": "loss/kl",
    "entropy_loss": "loss/entropy",
    "value_loss": "loss/value",
    "value": "value/mean",
    "return": "value/return",
    "value_error": "value/error",
    "value_clip": "value/clip_fraction",
    "explained_variance": "value/explained_variance",
    "critic_gradient_norm": "value/gradient_norm",
}


MAX_TURNS_SHOWN = 10
"""Of so many turns the mean reward is a metric of its own."""


def batch_metrics(batch: Batch, collected: Collected) -> dict[str, float]:
    """Metrics of the rollouts of a step, before any learning.

    A mean over valid sequences is left out where there are none: a 0 would pass for a bad reward.
    """
    rewards, valid = batch.need("rewards"), batch.need("valid")
    lengths = batch.mask.sum(dim=1).double()
    kept = rewards[valid]
    metrics = {
        "reward/invalid": 1 - float(valid.double().mean()),
        "rollout/length": float(lengths.mean()),
        "rollout/truncated": float(batch.need("truncated").double().mean()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/resampled": float(collected.resampled),
    }
    groups = batch.need("groups")
    metrics["rollout/drawn_per_group"] = 1 + collected.resampled / max(1, len(groups.unique()))
    if len(kept):
        size = batch.need("advantages").abs().sum() / batch.active.sum().clamp_min(1)
        metrics["reward/mean"] = float(kept.mean())
        metrics["reward/std"] = float(kept.std(correction=0))
        metrics["advantage/mean_abs"] = float(size)
    if len(groups.unique()) < len(groups):  # groups of one have no spread to report
        metrics["rollout/groups_without_signal"] = share_without_signal(batch)
    divergence = kl_to_reference(batch)
    if divergence is not None:
        metrics["objective/kl"] = divergence
    if batch.teacher_logprobs is not None and len(kept):
        apart = keep(batch.need("old_logprobs") - batch.teacher_logprobs, batch.active)
        metrics["teacher/kl"] = float(apart.sum() / batch.active.sum().clamp_min(1))
    metrics |= _objective(batch, collected) | _greedy(collected) | _turns(collected)
    metrics |= _environment(collected)
    return (
        metrics | _states(collected) | _parts(collected) | _times(collected, float(lengths.sum()))
    )


def kl_to_reference(batch: Batch) -> float | None:
    """Mean ``Σ log π_old − log π_ref`` of the valid sequences; None where one of them is missing.

    >>> import torch
    >>> kl_to_reference(Batch.from_rewards([1.0]).replace(valid=torch.tensor([True]))) is None
    True
    """
    valid = batch.need("valid")
    if batch.ref_logprobs is None or not bool(valid.any()):
        return None
    log_ratio = keep(batch.need("old_logprobs") - batch.ref_logprobs, batch.active)
    return float(log_ratio.detach().sum(dim=1)[valid].mean())


def step_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """The optimiser steps of one batch: maxima stay maxima, everything else is averaged.

    Skipped steps are counted, and are in no other number unless there is no other step.
    """
    num_skipped = sum(result.skipped for result in results)
    num_taken = len(results) - num_skipped
    results = [result for result in results if not result.skipped] or results
    metrics = {
        "loss/total": _mean([result.loss for result in results]),
        "train/gradient_norm": _mean([result.gradient_norm for result in results]),
        "train/learning_rate": results[-1].learning_rate,
        "train/optimiser_steps": float(num_taken),
        "train/skipped": float(num_skipped),
    }
    for name in sorted({name for result in results for name in result.metrics}):
        values = [result.metrics[name] for result in results if name in result.metrics]
        metrics[_NAMES.get(name, name)] = max(values) if name.endswith("_max") else _mean(values)
    if "policy/clip_low" in metrics:
        metrics["policy/clip_fraction"] = metrics["policy/clip_low"] + metrics["policy/clip_high"]
    if num_taken and "approx_kl" in results[-1].metrics:
        metrics["policy/step_kl"] = results[-1].metrics["approx_kl"]
    return metrics


def _objective(batch: Batch, collected: Collected) -> dict[str, float]:
    """Mean score of the rollouts, and the mean of what shaping added to or subtracted from it."""
    scores = [r.score.value for r in collected.rollouts if r.score is not None and r.score.ok]
    if not scores:
        return {}
    metrics = {"objective/scores": _mean(scores)}
    if batch.token_rewards is not None:
        given = keep(batch.token_rewards, batch.active).sum(dim=1)[batch.need("valid")]
        metrics["objective/non_score_reward"] = float(given.mean()) - metrics["objective/scores"]
    return metrics


def _greedy(collected: Collected) -> dict[str, float]:
    """Mean score of the greedy completions, one of each prompt, where the advantage needs them."""
    found = {r.group: r.greedy.score for r in collected.rollouts if r.greedy is not None}
    values = [score.value for score in found.values() if score is not None and score.ok]
    if not found:
        return {}
    metrics = {"reward/greedy_invalid": 1 - len(values) / len(found)}
    return metrics | ({"reward/greedy": _mean(values)} if values else {})


def _turns(collected: Collected) -> dict[str, float]:
    """Turns of the policy in an episode, and what each has earned; none where all have one turn.

    Counts are over all episodes, rewards over the valid ones that have such a turn.
    """
    counts = [sum(turn.sampled for turn in r.turns) for r in collected.rollouts]
    if max(counts, default=0) < 2:
        return {}
    by_number: dict[int, list[float]] = {}
    for rollout in collected.rollouts:
        if rollout.score is not None and rollout.score.ok:
            for number, earned in enumerate(rollout.earned[:MAX_TURNS_SHOWN], start=1):
                by_number.setdefault(number, []).append(earned)
    metrics = {"rollout/turns": _mean(counts), "rollout/turns_max": float(max(counts))}
    return metrics | {f"reward/turn/{n}": _mean(values) for n, values in by_number.items()}


def _parts(collected: Collected) -> dict[str, float]:
    """Mean of every reward's own value, over the rollouts it could score."""
    found = mean_parts([r.score for r in collected.rollouts if r.score is not None])
    return {f"reward/part/{name}": value for name, value in found.items()}


def _environment(collected: Collected) -> dict[str, float]:
    """Turns, errors by kind, waiting and restarts, where an environment replied."""
    counts, rollouts = dict(collected.env), collected.rollouts
    if not counts:
        return {}
    waited, alive = counts.pop("waited", 0.0), counts.pop("alive", 0.0)
    turns = [sum(turn.sampled for turn in rollout.turns) for rollout in rollouts]
    metrics = {"env/turns": _mean(turns), "env/restarts": counts.pop("restarts", 0.0)}
    if alive > 0:
        metrics["env/wait_share"] = waited / alive
    for limit in ("max_turns", "max_tokens"):
        metrics[f"env/{limit}"] = _mean([float(r.limit == limit) for r in rollouts])
    return metrics | {f"env/{name}": value for name, value in counts.items()}


def _states(collected: Collected) -> dict[str, float]:
    """Shares of the broken scores by how they broke; no metric where none did."""
    states = [rollout.score.state for rollout in collected.rollouts if rollout.score is not None]
    broken = sorted({state for state in states if state != "ok"})
    return {f"reward/state/{state}": states.count(state) / len(states) for state in broken}


def _times(collected: Collected, num_tokens: float) -> dict[str, float]:
    seconds = {f"time/{name}": value for name, value in collected.seconds.items()}
    rollout = collected.seconds.get("rollout", 0.0)
    speed = {"rollout/tokens_per_second": num_tokens / rollout} if rollout > 0 else {}
    return seconds | speed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
