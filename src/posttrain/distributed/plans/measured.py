"""What a step costs on one engine and one learner, as lines through what was measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.build.algorithm import make_plan
from posttrain.config import RlSection
from posttrain.distributed.plans.simulate import LEARNING, Costs, LinearTime


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs, the share of groups that dynamic sampling keeps, and how all of it was found."""

    costs: Costs
    useful: float = 1.0
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Observed:
    """Seconds that were spent on ``fixed`` passes and ``each`` units of work."""

    fixed: float
    each: float
    seconds: float


def fit(observed: Sequence[Observed]) -> LinearTime:
    """The costs of a pass and of a unit, neither negative, by least squares; half are slower.

    >>> fit([Observed(2, 10, 7.0), Observed(2, 30, 17.0)])
    LinearTime(fixed=1.0, each=0.5)
    """
    aa = sum(row.fixed**2 for row in observed)
    bb = sum(row.each**2 for row in observed)
    ab = sum(row.fixed * row.each for row in observed)
    at = sum(row.fixed * row.seconds for row in observed)
    bt = sum(row.each * row.seconds for row in observed)
    alone = [LinearTime(at / aa if aa else 0.0, 0.0), LinearTime(0.0, bt / bb if bb else 0.0)]
    determinant = aa * bb - ab**2
    both = alone[1]
    if determinant > 1e-9 * aa * bb:
        both = LinearTime((at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant)
    if min(both) < 0:
        both = min(alone, key=lambda line: sum(_error(line, row) ** 2 for row in observed))
    ratios = [row.seconds / spent for row in observed if (spent := _spent(both, row)) > 0]
    scale = statistics.median(ratios) if ratios else 1.0
    return LinearTime(scale * both.fixed, scale * both.each)


def _spent(line: LinearTime, row: Observed) -> float:
    return line.fixed * row.fixed + line.each * row.each


def _error(line: LinearTime, row: Observed) -> float:
    return _spent(line, row) - row.seconds


def weight_moves(rl: RlSection) -> int:
    """How often learners exchange all weights for a micro-batch of a step.

    Three times for each epoch (forward, backward, gradients), once for π_old, once for π_ref.
    """
    asked = make_plan(rl).needs_inference
    return LEARNING * rl.epochs + asked + (rl.kl.placement != "none")


def shown(measured: Measured) -> Iterable[str]:
    """What was measured, in words."""
    costs = measured.costs
    lengths = sorted(itertools.chain.from_iterable(costs.groups))
    yield from measured.notes
    yield (
        f"a decoding pass {_ms(costs.decode.fixed)} + {_ms(costs.decode.each)} a sequence; "
        f"grading {_ms(costs.grading)} a completion"
    )
    yield f"a step {_ms(costs.train.fixed)} + {1e3 * costs.train.each:.3g} ms a token"
    middle, most = lengths[len(lengths) // 2], lengths[-1]
    yield (
        f"completions of {statistics.fmean(lengths):.0f} tokens (median {middle}, at most {most}, "
        f"{len(lengths):,} seen), prompts of {costs.prompt:.0f}; weights of {_size(costs)}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _size(costs: Costs) -> str:
    size = costs.weight_bytes
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
