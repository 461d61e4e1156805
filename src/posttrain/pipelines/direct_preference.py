"""Learning from preferences without a reward model: batches and objective of DPO and its kin."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.ops import keep
from posttrain.algorithms.pieces import needed
from posttrain.data.collate import collate_completions, first_tokens
from posttrain.pipelines.fit import shuffled
from posttrain.pipelines.reward_model import RankedTokens
from posttrain.protocols import Learner, Objective, Outputs
from posttrain.types import Batch, Terms
from posttrain.types.batch import send

Loss = functools.partial[Tensor]
"""A loss of ``DIRECT_LOSSES`` with its options, of which β is one."""
INFERRED = 256  # sets whose log-probs are asked for at once


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """Sets to learn from or to be measured by, and what the loss needs beside them.

    ``reference`` has the reference's log-probs of all completion tokens of a set, one after the
    other, where the loss ``needs`` them. With ``strangers``, number i is the prompt of set i with
    the completion of another prompt: what the policy makes of them is KTO's divergence.
    """

    sets: Sequence[RankedTokens]
    pad_token: int
    reference: Sequence[Tensor] = ()
    strangers: Preferences | None = None

    def batch(self, order: Sequence[int]) -> Batch:
        """Some of the sets as a batch."""
        sets = [self.sets[index] for index in order]
        batch = collate_completions([(s.rows, s.start) for s in sets], pad_token=self.pad_token)
        if self.reference:
            flat = torch.cat([self.reference[index] for index in order])
            ref = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, flat)
            batch = batch.replace(ref_logprobs=ref)
        if any(s.desirable is not None for s in sets):
            batch = batch.replace(rewards=torch.tensor([float(bool(s.desirable)) for s in sets]))
        return batch

    def divergence(self, order: Sequence[int], learner: Learner) -> Tensor:
        """``max(0, mean of log π − log ref)`` of the strangers of some sets: a number."""
        sums = torch.zeros((), dtype=torch.float64)
        for batch in (self.batch(part) for part in _parts(order)):
            logprobs = learner.infer(batch).need("old_logprobs").double()
            sums += keep(logprobs - batch.need("ref_logprobs"), batch.mask).sum()
        return (sums / len(order)).clamp_min(0.0)


def _parts(order: Sequence[int]) -> Iterator[Sequence[int]]:
    return (order[first : first + INFERRED] for first in range(0, len(order), INFERRED))


def strangers(sets: Sequence[RankedTokens]) -> list[RankedTokens]:
    """The prompt of each set with the completion of the next set that has another prompt.

    None becomes longer than the longest row of the sets, so all fit into the model's context.

    >>> one, two = (RankedTokens(rows=[(p, 9, p)], lengths=[2], start=1) for p in (5, 6))
    >>> [made.rows for made in strangers([one, two])]
    [[(5, 9, 6)], [(6, 9, 5)]]
    """
    prompts = [tuple(s.rows[0][: s.start]) for s in sets]
    longest = max((len(s.rows[0]) for s in sets), default=0)
    found, other, several = [], 0, len(set(prompts)) > 1
    for place, prompt in enumerate(prompts):
        ahead = range(max(other, place + 1), place + len(sets)) if several else ()
        other = next((n for n in ahead if prompts[n % len(sets)] != prompt), place + 1)
        lent = sets[other % len(sets)]
        row = (*prompt, *lent.rows[0][lent.start :])[:longest]
        found.append(RankedTokens(rows=[row], lengths=[len(row) - len(prompt)], start=len(prompt)))
    return found


def reference_logprobs(preferences: Preferences, learner: Learner) -> list[Tensor]:
    """The log-probs of all completion tokens of each set, under the learner's weights now."""
    found: list[Tensor] = []
    for part in _parts(range(len(preferences.sets))):
        batch = preferences.batch(part)
        logprobs = learner.infer(batch).need("old_logprobs")
        flat, counts = logprobs[batch.mask], [num_tokens(preferences.sets[index]) for index in part]
        found += flat.float().split(counts)
    return found


def num_tokens(ranked: RankedTokens) -> int:
    """Tokens of all completions of a set."""
    return sum(len(row) - ranked.start for row in ranked.rows)


def batches(
    preferences: Preferences,
    batch_size: int,
    *,
    learner: Learner,
    steps: int,
    seed: int,
    start: int = 0,
) -> Iterator[Batch]:
    """So many shuffled batches of sets, all of them in every epoch.

    A batch is made when it is asked for: KTO's divergence is that of the learner just then.
    """
    count = len(preferences.sets)
    for order in shuffled(count, batch_size, steps=steps, seed=seed, start=start):
        yield _with_divergence(preferences, order, learner=learner)


def _with_divergence(preferences: Preferences, order: Sequence[int], *, learner: Learner) -> Batch:
    batch = preferences.batch(order)
    if preferences.strangers is None:
        return batch
    return batch.replace(baseline=preferences.strangers.divergence(order, learner))


def direct_terms(outputs: Outputs, batch: Batch, *, loss: Loss) -> Terms:
    """The loss of each set at the first token of its first completion, where its weight is.

    A ranked set counts as the mean over its pairs of a better and a worse completion. The implicit
    reward of a completion is β (log π − log ref), without a reference β log π; of a loss that goes
    by lengths it is divided by the completion's.
    """
    logprobs, active = outputs.need("logprobs"), batch.active
    sums = keep(logprobs, active).sum(dim=1)
    compare = _labels if "baseline" in needed(loss) else _pairs
    losses, gaps, rows, share = compare(sums, batch, loss=loss)
    measured = {
        "loss": losses,
        "accuracy": (gaps.sign() + 1) / 2,
        "margin": float(loss.keywords["beta"]) * gaps,
    }
    first = first_tokens(active)
    placed = {
        name: torch.zeros_like(sums).index_add(0, rows, value * share)[:, None] * first
        for name, value in measured.items()
    }
    return Terms(
        loss=placed.pop("loss"),
        weighted={f"preference/{name}": value for name, value in placed.items()},
    )


# Of each comparison: its loss, by how much the implicit rewards differ over β, the first row of its
# set, and its share of that.
Compared = tuple[Tensor, Tensor, Tensor, Tensor]


def _labels(sums: Tensor, batch: Batch, *, loss: Loss) -> Compared:
    """Each completion is compared with the divergence."""
    ref, divergence = _reference(batch, sums), batch.need("baseline").to(sums)
    desirable = batch.need("rewards") > 0
    losses = loss(sums, ref, desirable=desirable, divergence=divergence)
    gain = (sums - ref - divergence).detach()
    rows = torch.arange(len(sums), device=sums.device)
    return losses, torch.where(desirable, gain, -gain), rows, torch.ones_like(gain)


def _pairs(sums: Tensor, batch: Batch, *, loss: Loss) -> Compared:
    """Every completion of a set is compared with all that are worse."""
    groups, lengths = batch.host.need("groups"), batch.active.sum(dim=1)
    same = groups[:, None] == groups
    better, worse = same.triu(diagonal=1).nonzero().T
    sizes, rows = same.sum(dim=1)[better], same.long().argmax(dim=1)[better]
    share = 2 / (sizes * (sizes - 1)).to(sums.dtype)
    better, worse, rows, share = (send(n, sums.device) for n in (better, worse, rows, share))
    given: dict[str, Tensor] = {}
    values = sums.detach()
    if "ref_logprobs" in needed(loss):
        ref = _reference(batch, sums)
        given |= {"ref_chosen": ref[better], "ref_rejected": ref[worse]}
        values = values - ref
    if "lengths" in needed(loss):
        given |= {"chosen_length": lengths[better], "rejected_length": lengths[worse]}
        values = values / lengths
    losses = loss(sums[better], sums[worse], **given)
    return losses, values[better] - values[worse], rows, share


def _reference(batch: Batch, like: Tensor) -> Tensor:
    return keep(batch.need("ref_logprobs").to(like.dtype), batch.active).sum(dim=1)


def objective(loss: Loss) -> Objective:
    """What a step minimises."""
    return Objective(functools.partial(direct_terms, loss=loss))


def held_out(preferences: Preferences, learner: Learner, *, loss: Loss) -> Mapping[str, float]:
    """Loss, accuracy and margin of sets that are not learned from, means over them; how many."""
    sums = {"test/loss": 0.0, "test/accuracy": 0.0, "test/margin": 0.0}
    count, divergence = len(preferences.sets), None
    if preferences.strangers is not None:
        divergence = preferences.strangers.divergence(range(count), learner)
    for part in _parts(range(count)):
        batch = preferences.batch(part).replace(baseline=divergence)
        logprobs = learner.infer(batch).need("old_logprobs").double()
        terms = direct_terms(Outputs(logprobs=logprobs), batch, loss=loss)
        found = {"loss": terms.loss, **terms.weighted}
        for name, value in found.items():  # one number a set, and zeros
            sums[f"test/{name.rpartition('/')[2]}"] += float(value.sum()) / count
    return {**sums, "test/num": float(count)}
