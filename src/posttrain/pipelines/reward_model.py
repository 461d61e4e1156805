"""Training a reward model: the batches and the objective of ranked sets, for ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms.losses import plackett_luce
from posttrain.algorithms.preferences import (
    Bin,
    accuracy,
    calibration_error,
    length_correlation,
    pair_calibration,
)
from posttrain.data.collate import collate_ranked
from posttrain.pipelines.fit import shuffled
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms


@dataclass(frozen=True, kw_only=True)
class RankedTokens:
    """The completions of one prompt as token rows with their prompt, best first.

    ``lengths`` count the tokens of each completion alone; they begin behind the ``start`` tokens of
    the prompt. ``margin`` is by how much the best one should win. A set of one has a label,
    ``desirable``.
    """

    rows: Sequence[Sequence[int]]
    lengths: Sequence[int]
    start: int = 0
    margin: float = 0.0
    desirable: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RankingMetrics:
    """Measures of a reward model on held-out ranked sets.

    ``accuracy`` is over all pairs of a set, ``margin`` their mean difference of score,
    ``length_correlation`` that of score and length: far from 0, the model may be judging length.
    """

    accuracy: float
    loss: float
    margin: float
    calibration_error: float
    length_correlation: float
    num_pairs: int
    bins: Sequence[Bin]
    scores: Tensor


def batches(
    sets: Sequence[RankedTokens],
    batch_size: int,
    *,
    steps: int,
    pad_token: int,
    seed: int,
    start: int = 0,
) -> Iterator[Batch]:
    """So many shuffled batches of sets, all of them in every epoch."""
    for order in shuffled(len(sets), batch_size, steps=steps, seed=seed, start=start):
        pairs = [(sets[index].rows, sets[index].margin) for index in order]
        yield collate_ranked(pairs, pad_token=pad_token)


def preference_terms(outputs: Outputs, batch: Batch) -> Terms:
    """Plackett–Luce over each set, which for pairs is Bradley–Terry.

    The loss of a set stands at the last token of its first row, where its weight is.
    """
    scores, groups = outputs.need("scores"), batch.need("groups")
    _, index, counts = groups.unique_consecutive(return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(groups), device=groups.device) - first[index]
    table = scores.new_zeros(len(counts), int(counts.max()))
    table = table.index_put((index, place), scores)
    present = torch.arange(table.shape[1], device=groups.device) < counts[:, None]
    margins = batch.need("margins").to(scores.dtype)[first]
    losses = plackett_luce(table, present, margin=margins)
    lead = scores.new_zeros(len(groups)).index_put((first,), losses)
    gap = (table[:, 0] - table[:, 1]).detach()
    means = {
        "preference/accuracy": (gap > 0).to(scores.dtype) + 0.5 * (gap == 0).to(scores.dtype),
        "preference/margin": gap,
    }
    spread = {name: value[index][:, None] * batch.mask for name, value in means.items()}
    spread["preference/score"] = scores.detach()[:, None] * batch.mask
    return Terms(loss=lead[:, None] * batch.mask, means=spread)


preference = Objective(preference_terms)


def judge(sets: Sequence[RankedTokens], scores: Sequence[Sequence[float]]) -> RankingMetrics:
    """Compare scores with the rankings they should reproduce: every pair of every set."""
    better: list[float] = []
    worse: list[float] = []
    for row in scores:
        for place, score in enumerate(row):
            better += [score] * (len(row) - place - 1)
            worse += row[place + 1 :]
    chosen, rejected = torch.tensor(better).double(), torch.tensor(worse).double()
    flat = torch.tensor([score for row in scores for score in row]).double()
    lengths = torch.tensor([length for member in sets for length in member.lengths]).double()
    bins = pair_calibration(chosen, rejected)
    return RankingMetrics(
        accuracy=accuracy(chosen, rejected),
        loss=float(-logsigmoid(chosen - rejected).mean()),
        margin=float((chosen - rejected).mean()),
        calibration_error=calibration_error(bins),
        length_correlation=length_correlation(flat, lengths),
        num_pairs=len(better),
        bins=bins,
        scores=flat,
    )
