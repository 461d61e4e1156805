"""Statistics of a reward model on held-out pairs: who wins, how sure it is, what length buys.

All are computed in float64 from scores alone, and none carries a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms import checks
from posttrain.algorithms.ops import whiten


def accuracy(chosen: Tensor, rejected: Tensor) -> float:
    """Share of pairs whose chosen completion scores higher; an exact tie counts one half.

    ``mean(1[r_c > r_r] + ½ · 1[r_c = r_r])``, the probability of ranking a pair right when ties
    are broken by a coin: a model that gives every text one score gets ½. Shapes: [N], [N] → a
    number in [0, 1].

    >>> accuracy(torch.tensor([2.0, 0.0, 1.0, 5.0]), torch.tensor([1.0, 3.0, 1.0, 4.0]))
    0.625
    """
    chosen, rejected = _columns(chosen=chosen, rejected=rejected)
    return float(((chosen - rejected).sign() + 1).mean() / 2)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """One row of a reliability table: ``count`` predictions p with ``low ≤ p < high``.

    ``predicted`` and ``observed`` are the means of predictions and outcomes in the bin.
    """

    low: float
    high: float
    predicted: float
    observed: float
    count: int


def calibration(probabilities: Tensor, observed: Tensor, *, bins: int = 10) -> list[Bin]:
    """Reliability table: mean prediction against the observed rate, in bins of equal width.

    Bin k of K holds ``k/K ≤ p < (k + 1)/K``, the last one 1 as well; empty bins are left out.
    ``observed`` is 1 where it happened, 0 where it did not, or a rate between (Guo et al., 2017,
    arXiv:1706.04599, §2). Shapes: [N], [N] → at most K bins, in order.

    >>> predicted, happened = torch.tensor([0.125, 0.375, 0.75]), torch.tensor([0.0, 1.0, 1.0])
    >>> for row in calibration(predicted, happened, bins=2):
    ...     print(row)
    Bin(low=0.0, high=0.5, predicted=0.25, observed=0.5, count=2)
    Bin(low=0.5, high=1.0, predicted=0.75, observed=1.0, count=1)
    """
    checks.number("bins", bins, low=1)
    probabilities, observed = _columns(probabilities=probabilities, observed=observed)
    _rates(probabilities=probabilities, observed=observed)
    # k / K, not k · (1 / K): so 0.29 falls into the bin that begins at 0.29.
    edges = [number / bins for number in range(bins + 1)]
    inner = probabilities.new_tensor(edges[1:-1])
    index = torch.bucketize(probabilities, inner, right=True)
    table = []
    for number in index.unique().tolist():
        here = index == number
        table.append(
            Bin(
                low=edges[number],
                high=edges[number + 1],
                predicted=float(probabilities[here].mean()),
                observed=float(observed[here].mean()),
                count=int(here.sum()),
            )
        )
    return table


def pair_calibration(chosen: Tensor, rejected: Tensor, *, bins: int = 10) -> list[Bin]:
    """:func:`calibration` of ``p = σ(r_a − r_b)``, the predicted rate at which a is preferred to b.

    A pair has no first member: shown as (chosen, rejected) alone, the observed rate would be 1 in
    every bin. So each pair counts both ways, as (p, 1) and as (1 − p, 0), and the counts add up to
    2N. Where labels are flipped with rate e, no bin can observe less than e or more than 1 − e.
    Shapes: [N], [N] → at most K bins, in order.

    >>> odds = torch.tensor([3.0, 3.0, 3.0, 3.0]).log()  # each pair: three to one for a
    >>> wins = torch.tensor([1.0, 1.0, 1.0, -1.0])       # and a was chosen in three of four
    >>> for row in pair_calibration(odds * wins, torch.zeros(4)):
    ...     print(row.low, row.high, round(row.predicted, 4), row.observed, row.count)
    0.2 0.3 0.25 0.25 4
    0.7 0.8 0.75 0.75 4
    """
    chosen, rejected = _columns(chosen=chosen, rejected=rejected)
    margin = chosen - rejected
    probabilities = torch.cat([margin, -margin]).sigmoid()
    observed = torch.cat([torch.ones_like(margin), torch.zeros_like(margin)])
    return calibration(probabilities, observed, bins=bins)


def calibration_error(table: Sequence[Bin]) -> float:
    """Expected calibration error: ``Σ_k n_k |predicted_k − observed_k| / Σ_k n_k``.

    Naeini et al., 2015; Guo et al., 2017, arXiv:1706.04599, eq. 3. 0 is perfect; always saying ½
    is perfect too, so read it beside the accuracy.

    >>> calibration_error([Bin(low=0.0, high=0.5, predicted=0.25, observed=0.5, count=3),
    ...                    Bin(low=0.5, high=1.0, predicted=0.75, observed=0.75, count=1)])
    0.1875
    """
    total = sum(row.count for row in table)
    if total == 0:
        raise ValueError("table: holds no predictions; make it with calibration, from some pairs")
    return sum(row.count * abs(row.predicted - row.observed) for row in table) / total


def length_correlation(scores: Tensor, lengths: Tensor) -> float:
    """Pearson correlation of score and completion length: 1 is a model that pays for tokens.

    ``r = mean((x − mean x)(y − mean y)) / (std x · std y)``; 0.0 where either has no spread.
    Shapes: [N], [N] → a number in [−1, 1].

    >>> scores, lengths = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1, 3, 3, 5])
    >>> round(length_correlation(scores, lengths), 4)  # covariance ½, deviations ½ and √2
    0.7071
    """
    scores, lengths = _columns(scores=scores, lengths=lengths)
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    product = whiten(scores, everywhere) * whiten(lengths, everywhere)
    return float(product.mean().clamp(-1, 1))


def _columns(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Two finite columns of one length, as float64 constants; what they are not is an error."""
    (name, first), (other, second) = tensors.items()
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(
            f"{name}, {other}: expected two tensors of one shape [N], got {list(first.shape)} and "
            f"{list(second.shape)}; entry i of both is about the same example"
        )
    if len(first) == 0:
        raise ValueError(f"{name}: no examples; hold out at least one")
    for label, tensor in tensors.items():
        checks.finite(label, tensor)
    return tuple(tensor.detach().double() for tensor in tensors.values())


def _rates(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        outside = tensor[(tensor < 0) | (tensor > 1)]
        if len(outside):
            raise ValueError(
                f"{name}: must lie between 0 and 1, got {outside[0].item()}; turn a difference of "
                "scores into a rate with torch.sigmoid"
            )
