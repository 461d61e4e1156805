"""From finished runs to rows of numbers, and from rows to what each choice changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from posttrain.walkthrough.measure import (
    entropy,
    expected,
    gradient_noise,
    likeliest,
    one_token_changes,
    silent_groups,
)
from posttrain.walkthrough.settings import LARGEST, PROMPTS, REWARDS, Schedule, prompts
from posttrain.walkthrough.sorting_policy import Policies
from posttrain.walkthrough.training import History

Row = dict[str, Any]

# The comparisons of the tables: (title, column, value, value that it is compared with).
CHOICES = (
    ("centered against rewards", "delta", "centered", "rewards"),
    ("normalized against rewards", "delta", "normalized", "rewards"),
    ("normalized against centered", "delta", "normalized", "centered"),
    ("max_reward against rewards", "delta", "max_reward", "rewards"),
    ("max_centred against centered", "delta", "max_centred", "centered"),
    ("unclipped against naive", "loss", "unclipped", "naive"),
    ("clipped against naive", "loss", "clipped", "naive"),
    ("KL on against off", "kl", "on", "off"),
)


def make_row(
    history: History, index: int, *, num_batches: int, schedule: Schedule | None = None
) -> Row:
    """The row of ``results.json`` for one configuration of a history.

    ``final_reward`` is the exact expected reward of the final policy, over all 125 responses to
    each prompt; ``exact_sorted`` is its probability of sorting a prompt exactly. Spread is the
    sample standard deviation over seeds. ``gradient_variance`` is the noise-to-signal ratio of
    :func:`posttrain.walkthrough.measure.gradient_noise` at the initial policy, and
    ``gradient_variance_early`` after a tenth of the epochs; None where no batch had a gradient.

    Shares, all between 0 and 1: ``silent_groups_*`` of the groups with equal rewards in the first
    and the last epoch; ``never_full_marks`` of the pairs of seed and prompt in which no response
    sampled in the whole training earned the largest reward; ``modes_*`` of the pairs whose
    likeliest final response holds every number of the prompt, or is in order, or both, or is
    ``trapped``: short of full marks, with no change of one token that earns more.
    """
    configuration, lanes = history.configurations[index], history.lanes(index)
    final, score = history.final.lanes(lanes), REWARDS[configuration.reward]
    rewards, losses = history.rewards[lanes], history.losses[lanes]
    per_epoch = losses.shape[1] // rewards.shape[1]
    noise = [
        gradient_noise(
            policies.lanes(lanes),
            configuration,
            seeds=history.seeds,
            num_batches=num_batches,
            schedule=schedule,
        ).ratio()
        for policies in (history.initial, history.early)
    ]
    final_rewards = expected(final, score)
    return {
        "delta": configuration.delta,
        "loss": configuration.loss,
        "kl": configuration.kl,
        "reward": configuration.reward,
        "seeds": len(history.seeds),
        "initial_reward_mean": _mean(expected(history.initial.lanes(lanes), score)),
        "final_reward_mean": _mean(final_rewards),
        "final_reward_std": _round(float(final_rewards.double().std())),
        "exact_sorted": _mean(expected(final, REWARDS["exactly_sorted"])),
        "gradient_variance": _round(noise[0]),
        "gradient_variance_early": _round(noise[1]),
        "final_entropy": _mean(entropy(final)),
        "never_full_marks": _mean(rewards.amax((1, 3)) < LARGEST[configuration.reward]),
        **_modes(final, configuration.reward),
        "silent_groups_first": _round(silent_groups(rewards[:, 0])),
        "silent_groups_last": _round(silent_groups(rewards[:, -1])),
        "first_loss_mean": _mean(losses[:, :per_epoch]),
        "last_loss_mean": _mean(losses[:, -per_epoch:]),
        "final_rewards": [_round(value) for value in final_rewards.tolist()],
    }


def _modes(policies: Policies, reward: str) -> dict[str, float]:
    """What the likeliest responses look like, as shares."""
    responses, length = likeliest(policies), len(PROMPTS[0])
    credit = REWARDS["inclusion_ordering"](prompts(), responses)
    in_order = (responses[..., :-1] <= responses[..., 1:]).sum(-1)
    complete = credit - in_order == length
    earned = REWARDS[reward](prompts(), responses)
    nearby = REWARDS[reward](prompts(), one_token_changes(responses)).amax(-1, keepdim=True)
    return {
        "modes_complete": _mean(complete),
        "modes_in_order": _mean(in_order == length - 1),
        "modes_sorted": _mean(complete & (in_order == length - 1)),
        "modes_trapped": _mean((earned < LARGEST[reward]) & (nearby <= earned)),
    }


def effect(
    rows: Sequence[Row], choice: tuple[str, str, str, str], *, reward: str
) -> tuple[float, float] | None:
    """How one choice changed the final reward: the mean over seeds and its standard error.

    A run is paired with the run of the same seed that differs in this choice alone; a seed's
    differences are averaged over all such pairs before the seeds are compared. None where the
    rows hold no such pair.

    >>> base = {"delta": "centered", "kl": "off", "reward": "exactly_sorted"}
    >>> rows = [{**base, "loss": "naive", "final_rewards": [1.0, 2.0]},
    ...         {**base, "loss": "clipped", "final_rewards": [2.0, 5.0]}]
    >>> effect(rows, ("", "loss", "clipped", "naive"), reward="exactly_sorted")
    (2.0, 1.0)
    """
    _, column, value, against = choice
    with_it = {_rest(row, column): row for row in rows if row[column] == value}
    differences = [
        [a - b for a, b in zip(with_it[key]["final_rewards"], row["final_rewards"], strict=True)]
        for row in rows
        if row["reward"] == reward
        and row[column] == against
        and (key := _rest(row, column)) in with_it
    ]
    if not differences:
        return None
    by_seed = [statistics.fmean(seed) for seed in zip(*differences, strict=True)]
    return statistics.fmean(by_seed), statistics.stdev(by_seed) / math.sqrt(len(by_seed))


def find(rows: Sequence[Row], **columns: str) -> Row | None:
    """The first row with these values, or None."""
    for row in rows:
        if all(row[column] == value for column, value in columns.items()):
            return row
    return None


def summary(rows: Sequence[Row]) -> list[str]:
    """The result in a few plain sentences, each with the number it rests on."""
    lines = []
    for reward in dict.fromkeys(row["reward"] for row in rows):
        mine = [row for row in rows if row["reward"] == reward]
        best = max(mine, key=lambda row: row["final_reward_mean"])
        lines.append(
            f"{reward}: the mean reward rises from {best['initial_reward_mean']:.2f} to "
            f"{best['final_reward_mean']:.2f} at best ({best['delta']}, {best['loss']}, KL "
            f"{best['kl']}); that policy sorts a prompt exactly with probability "
            f"{best['exact_sorted']:.2f}. {_centring(mine, reward)}"
        )
    raw, centred = (find(rows, delta=delta) for delta in ("rewards", "centered"))
    if raw and centred and raw["gradient_variance"] and centred["gradient_variance"]:
        lines.append(
            f"The first gradient of {raw['reward']} has {raw['gradient_variance']:.1f} times as "
            f"much noise as signal with raw rewards, {centred['gradient_variance']:.1f} times "
            "with centered ones."
        )
    return lines


def _centring(rows: Sequence[Row], reward: str) -> str:
    change = effect(rows, CHOICES[0], reward=reward)
    if change is None:
        return ""
    mean, error = change
    clear = abs(mean) > 2 * error
    verdict = ("helps" if mean > 0 else "hurts") if clear else "makes no clear difference"
    return f"Centring {verdict} ({mean + 0.0:+.2f} ± {error:.2f} over raw rewards)."


def _rest(row: Row, column: str) -> tuple[str, ...]:
    return tuple(row[name] for name in ("delta", "loss", "kl", "reward") if name != column)


def _mean(values: Tensor) -> float:
    return round(float(values.double().mean()), 4)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
