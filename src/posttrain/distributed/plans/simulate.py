"""How long the steps of a cluster take: its queues simulated, from costs that were measured.

    engines   ┤ batch 0 ├ batch 1 ┤ sync ├ batch 2 ┤ …      N of them, each with its groups
    grading          ├ 0 ┤     ├ 1 ┤            ├ 2 ┤       once the whole batch is sampled
    learners             ┤ step 0 ├ sync ├ step 1 ┤ …       M ranks, each with its sequences

A decoding pass with r sequences takes ``fixed + each · r``, a learner's step the same of tokens,
and a batch is made and synced when :mod:`posttrain.rollout.run_ahead` makes and syncs it:

    begun[k]  = max(synced[k − L], done[k − 1])          L = max_lag; synced[n] = 0 for n ≤ 0
    done[k]   = begun[k] + sampling[k] + grading[k]      the slowest engine, then the graders
    learned   = max(done[k], ready[k]) + training[k]     the slowest rank, and its communication
    synced[k + 1] = max(learned, done[k + L]) + sync     no batch is under way while weights change
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from posttrain.rollout.collect import next_draw

STEPS = 200  # of a simulation
LEARNING = 3  # times that FSDP moves all weights for a micro-batch: forward, backward, gradients


class LinearTime(NamedTuple):
    """Seconds as ``fixed + each · n``."""

    fixed: float
    each: float

    def __call__(self, count: float) -> float:
        return self.fixed + self.each * count


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured on one engine and one learner, in seconds and bytes.

    ``groups`` are the lengths of the completions of each prompt that was sampled, ``prompt`` the
    mean length of a prompt; steps draw from them.
    """

    decode: LinearTime  # a pass of an engine, by the sequences that it decodes
    grading: float  # of one completion, with as many workers as were measured
    train: LinearTime  # a step of the loop, by the tokens of prompts and completions
    weight_bytes: float
    groups: Sequence[Sequence[int]]
    prompt: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A cluster, and what a step asks of it.

    ``bandwidth`` is that of the weights to the engines, all at once, ``learner_bandwidth`` that of
    each learner to the others, both in bytes a second. ``engines`` = 0: the driver samples, and
    learns where there is one learner.
    """

    learners: int
    engines: int
    max_lag: int
    prompts_per_step: int
    group_size: int
    bandwidth: float
    learner_bandwidth: float
    colocate: bool = False  # engines have no place of their own
    call: float = 0.0  # seconds of a call to another process, beside what it does
    rounds: int = 1  # pieces of a batch for each engine
    slots: int | None = None  # sequences that an engine decodes at once
    moves: int = LEARNING  # of all weights between learners, for each micro-batch of a step
    minibatches: int = 1
    micro_batch_tokens: float | None = None
    useful: float = 1.0  # share of groups that dynamic sampling keeps
    max_resamples: int = 0

    @property
    def is_one_process(self) -> bool:
        """Whether the process that samples also learns."""
        return self.learners == 1 and not self.engines

    @property
    def takes_turns(self) -> bool:
        """Whether sampling and learning want the same device: nothing but grading overlaps then."""
        return self.is_one_process or self.colocate


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a simulation came to, after the first steps; seconds are of one step."""

    step: float
    fastest: float  # a tenth of the steps is faster,
    slowest: float  # and a tenth slower
    samples_per_second: float
    tokens_per_second: float
    engine_idle: float
    learner_idle: float
    engine_balance: float  # mean time of an engine / that of the slowest
    learner_balance: float
    sampling: float
    grading: float
    training: float
    sync: float

    @property
    def making(self) -> float:
        """Seconds in which a batch is made: sampled, then graded."""
        return self.sampling + self.grading

    @property
    def bottleneck(self) -> str:
        """What takes longest: learning, or of making a batch the longer part, or the sync."""
        sides = {"training": self.training, "sync": self.sync}
        sides["sampling" if self.sampling >= self.grading else "grading"] = self.making
        return max(sides, key=lambda name: sides[name])


def sampling_seconds(
    lengths: Sequence[int], decode: LinearTime, *, slots: int | None = None
) -> float:
    """How long an engine decodes completions of these lengths, in this order, ``slots`` at once.

    A sequence that ends frees its slot for the next; a pass costs what its sequences cost.

    >>> sampling_seconds([4, 2], LinearTime(fixed=1.0, each=0.5))  # two passes with 2, two with 1
    7.0
    >>> sampling_seconds([4, 2], LinearTime(fixed=1.0, each=0.5), slots=1)
    9.0
    """
    waiting = list(reversed(lengths))
    ends: list[int] = []
    passes, seconds = 0, 0.0
    while waiting or ends:
        while waiting and (slots is None or len(ends) < slots):
            heapq.heappush(ends, passes + waiting.pop())
        end = heapq.heappop(ends)
        seconds += (end - passes) * decode(1 + len(ends))
        passes = end
    return seconds


def pieces(
    groups: Sequence[Sequence[int]], engines: int, *, rounds: int
) -> list[Sequence[Sequence[int]]]:
    """The groups that are handed to an engine at a time; to one in the learner's process, all.

    >>> [len(piece) for piece in pieces([[1]] * 9, 2, rounds=2)]
    [2, 2, 2, 2, 1]
    """
    size = max(1, len(groups) // (rounds * engines)) if engines else len(groups)
    return [groups[first : first + size] for first in range(0, len(groups), size)]


def pool_seconds(
    groups: Sequence[Sequence[int]], costs: Costs, *, layout: Layout
) -> tuple[float, list[float]]:
    """How long engines that share a queue take over groups, and how long each of them works.

    As :mod:`posttrain.distributed.engine_pool` does it: pieces of whole groups, ``rounds`` for each
    engine, the next one for whoever is free. One engine in the learner's process has all at once.
    """
    call = layout.call if layout.engines else 0.0
    free = [(0.0, engine) for engine in range(max(1, layout.engines))]
    for piece in pieces(groups, layout.engines, rounds=layout.rounds):
        lengths = list(itertools.chain.from_iterable(piece))
        seconds = sampling_seconds(lengths, costs.decode, slots=layout.slots) + call
        begun, engine = free[0]
        heapq.heapreplace(free, (begun + seconds, engine))
    busy = [0.0] * len(free)
    for ended, engine in free:
        busy[engine] = ended
    return max(busy), busy


def balanced(costs: Sequence[float], ranks: int) -> list[float]:
    """What each rank has where the dearest goes first, each to the rank with the least.

    >>> balanced([5.0, 4.0, 3.0, 3.0], 2)
    [8.0, 7.0]
    """
    loads = [0.0] * ranks
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return sorted(loads, reverse=True)


@dataclass
class _Step:
    """One step's work, and what it keeps busy."""

    sampling: float
    busy: list[float]  # of each engine
    grading: float
    training: float
    loads: list[float]  # tokens of each rank
    samples: int
    tokens: int


@dataclass
class _Times:
    """When things happened, by step."""

    done: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=lambda: [0.0])


def simulate(costs: Costs, layout: Layout, *, steps: int = STEPS, seed: int = 0) -> Prediction:
    """Steps of a cluster, with lengths drawn from those that were measured."""
    if not costs.groups:
        raise ValueError("plan: no completion was measured, so there are no lengths to draw from")
    drawn = random.Random(seed)
    lag, settling = layout.max_lag, 2 * layout.max_lag + 2  # until the queue is as it stays
    work = [_work(costs, layout, drawn=drawn) for _ in range(steps + settling + lag + 1)]
    sync = 0.0 if layout.is_one_process else costs.weight_bytes / layout.bandwidth
    times = _Times()
    for step in range(steps + settling):
        while len(times.done) <= step + lag:  # batches that may be made before this one is learned
            times.done.append(_made(times, work, layout=layout))
        learned = max(times.done[step], times.synced[step]) + work[step].training
        if lag and layout.takes_turns:  # what is sampled meanwhile is in the way
            learned += work[step + lag].sampling
        times.synced.append(max(learned, times.done[step + lag]) + sync)
    return _summary(work[settling : settling + steps], times.synced[settling:], sync=sync)


def _made(times: _Times, work: Sequence[_Step], *, layout: Layout) -> float:
    """When the next batch is made."""
    number = len(times.done)
    allowed = times.synced[max(0, number - layout.max_lag)]
    begun = max(allowed, times.done[-1] if times.done else 0.0)
    return begun + work[number].sampling + work[number].grading


def _work(costs: Costs, layout: Layout, *, drawn: random.Random) -> _Step:
    """One step's work: the groups that are sampled until enough are useful, and those learned."""
    busy, sampling, graded = [0.0] * max(1, layout.engines), 0.0, 0
    kept: list[Sequence[int]] = []
    spare: list[Sequence[int]] = []
    for _ in range(layout.max_resamples + 1):
        asked = next_draw(layout.prompts_per_step, kept=len(kept), spare=len(spare))
        groups = [_group(costs, layout, drawn=drawn) for _ in range(asked)]
        longest, seconds = pool_seconds(groups, costs, layout=layout)
        busy = [before + more for before, more in zip(busy, seconds, strict=True)]
        sampling += longest
        graded += sum(map(len, groups))
        for group in groups:
            (kept if drawn.random() < layout.useful else spare).append(group)
        if len(kept) >= layout.prompts_per_step:
            break
    learned = [*kept, *spare][: layout.prompts_per_step]
    sequences = [costs.prompt + length for group in learned for length in group]
    loads = balanced(sequences, layout.learners)
    return _Step(
        sampling=sampling,
        busy=busy,
        grading=graded * costs.grading,
        training=costs.train(loads[0]) + communication(costs, layout, tokens=loads[0]),
        loads=loads,
        samples=len(sequences),
        tokens=sum(map(sum, learned)),
    )


def _group(costs: Costs, layout: Layout, *, drawn: random.Random) -> Sequence[int]:
    """A group that was measured; of another size, one drawn from it: a prompt has its lengths."""
    group = drawn.choice(costs.groups)
    if len(group) == layout.group_size:
        return group
    return drawn.choices(group, k=layout.group_size)


def communication(costs: Costs, layout: Layout, *, tokens: float) -> float:
    """Seconds that sharded learners exchange weights and gradients in a step, none of it hidden.

    ``micro-batches · moves · bytes · (M − 1) / M / bandwidth``: a rank holds 1/M of the weights.
    """
    ranks, most = layout.learners, layout.micro_batch_tokens
    parts = max(layout.minibatches, math.ceil(tokens / most) if most else 1)
    moved = parts * layout.moves * costs.weight_bytes * (ranks - 1) / ranks
    return moved / layout.learner_bandwidth


def _summary(work: Sequence[_Step], synced: Sequence[float], *, sync: float) -> Prediction:
    took = sorted(end - begun for begun, end in itertools.pairwise(synced))
    total, count = synced[-1] - synced[0], len(work)
    busy = [sum(each) for each in zip(*(step.busy for step in work), strict=True)]
    learning = sum(step.training for step in work)
    slowest = sum(max(step.busy) for step in work)
    return Prediction(
        step=total / count,
        fastest=took[count // 10],
        slowest=took[-1 - count // 10],
        samples_per_second=sum(step.samples for step in work) / total,
        tokens_per_second=sum(step.tokens for step in work) / total,
        engine_idle=1 - statistics.fmean(busy) / total,
        learner_idle=1 - learning / total,
        engine_balance=statistics.fmean(busy) / slowest if slowest else 1.0,
        learner_balance=_mean_over_max(work),
        sampling=sum(step.sampling for step in work) / count,
        grading=sum(step.grading for step in work) / count,
        training=learning / count,
        sync=sync,
    )


def _mean_over_max(work: Sequence[_Step]) -> float:
    most = sum(step.loads[0] for step in work)
    return sum(statistics.fmean(step.loads) for step in work) / most if most else 1.0
