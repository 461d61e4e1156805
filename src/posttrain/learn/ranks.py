"""What one rank of a learner knows of the others: its sequences, sums and decisions of all.

A learner over several ranks is the same program in each: every rank is asked the same with the
whole batch, computes its own sequences, and has the same answer. Averaging weights are part of the
batch, so what ranks have summed is added, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from posttrain.types import Batch
from posttrain.types.batch import TokenSpans, spans

Value = TypeVar("Value")
Parts = list[tuple[Tensor, Batch]]

# A token's products with the weights of a layer (width w) cost 24·w² operations, its attention to
# half of the t tokens 2·w·t: of t = 12·w tokens both cost the same. This is that of w = 1024.
ATTENTION_COSTS_AS_MUCH = 12_288


@dataclass(frozen=True)
class Ranks:
    """One of ``size`` ranks; torch.distributed connects them where there are several.

    >>> ALONE.any(True), ALONE.each("this rank's"), ALONE.total(torch.tensor(2.0))
    (True, ["this rank's"], tensor(2.))
    """

    rank: int = 0
    size: int = 1

    def mine(self, batch: Batch, *, keep_groups: bool = False) -> Tensor:
        """The rows of this rank, in their order; each row with an active token is some rank's."""
        return torch.tensor(shares(batch, self.size, keep_groups=keep_groups)[self.rank]).long()

    def cut(
        self, batch: Batch, cut: Callable[[Batch], Parts], *, keep_groups: bool = False
    ) -> Parts:
        """What ``cut`` makes of this rank's rows, and as many parts as any rank has.

        Ranks compute together, so one with fewer parts repeats the cheapest sequence: without
        rows, because nothing of it counts.
        """
        if self.size == 1:
            return cut(batch)
        rows = self.mine(batch, keep_groups=keep_groups)
        parts = [(rows[index], part) for index, part in cut(batch.select(rows))]
        missing = max(self.each(len(parts))) - len(parts)
        none = torch.zeros(0, dtype=torch.long)
        return [*parts, *([(none, cheapest(batch, keep_groups=keep_groups))] * missing)]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors; they have the same shape and type."""
        if self.size == 1:
            return tensor
        summed = tensor.to("cpu", copy=True)
        distributed.all_reduce(summed)
        return summed.to(tensor.device)

    def any(self, yes: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.total(torch.tensor(int(yes))))

    def each(self, value: Value) -> list[Value]:
        """What every rank gives, a few numbers or words, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found


ALONE = Ranks()
"""The one rank that is all there is."""


def connect(device: str, *, deadline: float, **where: Any) -> Ranks:
    """Join the other ranks, who all call this; ``where`` are options of init_process_group.

    GPUs exchange tensors by NCCL, and everything else goes by gloo. A rank that waits for another
    one longer than ``deadline`` seconds raises.
    """
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        timeout=timedelta(seconds=deadline),
        **where,
    )
    return Ranks(rank=distributed.get_rank(), size=distributed.get_world_size())


def shares(batch: Batch, size: int, *, keep_groups: bool = False) -> list[list[int]]:
    """The rows of each of ``size`` ranks, at about equal cost; groups stay whole if asked.

    A sequence of t tokens costs ``t + t² / 12,288``: products with the weights, and attention. A
    prompt costs its tokens once in each rank that has one of its sequences, so that these are
    parted only as far as the busiest rank has less to do then.

    >>> mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    >>> shares(Batch(tokens=mask.long(), mask=mask), 2)
    [[0], [1, 2]]
    """
    host = batch.host
    lengths, found = _ends(host).tolist(), spans(host)
    costs = [length + length**2 / ATTENTION_COSTS_AS_MUCH for length in lengths]
    names = host.need("groups").tolist() if keep_groups else found.owner
    units: dict[int, list[int]] = {}
    for row in sorted(_active_rows(host), key=lambda row: -lengths[row]):
        units.setdefault(names[row], []).append(row)
    most = max(map(len, units.values()), default=1)
    sizes = [most] if keep_groups else [2**power for power in range(most.bit_length() + 1)]
    ways = [
        _balanced(
            [rows[at : at + each] for rows in units.values() for at in range(0, len(rows), each)],
            size,
            costs=costs,
            found=found,
        )
        for each in sizes
    ]
    _, best = min(ways, key=lambda way: way[0])
    return [sorted(rows) for rows in best]


def _balanced(
    units: list[list[int]], size: int, *, costs: list[float], found: TokenSpans
) -> tuple[float, list[list[int]]]:
    """The cost of the busiest rank, and the rows of all: the costliest go to the idlest."""
    prompts = [set[int]() for _ in range(size)]
    loads = [0.0] * size
    rows: list[list[int]] = [[] for _ in range(size)]

    def added(unit: list[int], known: set[int]) -> float:
        owners = [found.owner[row] for row in unit]
        once = set(owners) - known
        shared = sum(found.first[owner] for owner in owners) - sum(
            map(found.first.__getitem__, once)
        )
        return sum(costs[row] for row in unit) - shared

    for unit in sorted(units, key=lambda unit: -added(unit, set())):
        rank = min(range(size), key=lambda rank: loads[rank] + added(unit, prompts[rank]))
        loads[rank] += added(unit, prompts[rank])
        prompts[rank].update(found.owner[row] for row in unit)
        rows[rank] += unit
    return max(loads), rows


def cheapest(batch: Batch, *, keep_groups: bool = False) -> Batch:
    """The beginning of the shortest sequence, or the shortest group whole, with weights of 0.

    For a pass that must be made and must not count.
    """
    host = batch.host
    ends, rows = _ends(host), _active_rows(host)
    if keep_groups:
        groups = host.need("groups")
        least = min(groups[rows].tolist(), key=lambda group: int(ends[groups == group].sum()))
        chosen = (groups == least).nonzero()[:, 0]
        width = int(ends[chosen].max())
    else:
        chosen = torch.tensor([min(rows, key=lambda row: int(ends[row]))])
        width = int(host.active[chosen[0]].long().argmax()) + 1  # up to its first chosen token
    part = batch.select(chosen).trim(width)
    return part if part.weights is None else part.replace(weights=torch.zeros_like(part.weights))


def _active_rows(batch: Batch) -> list[int]:
    rows: list[int] = batch.active.any(dim=1).nonzero()[:, 0].tolist()
    return rows


def _ends(batch: Batch) -> Tensor:
    """[B]: tokens up to the last real one."""
    real = batch.mask if batch.attention is None else batch.attention
    return (real * torch.arange(1, real.shape[1] + 1)).amax(dim=1)
