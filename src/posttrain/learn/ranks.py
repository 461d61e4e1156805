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
from posttrain.types.prompts import spans

Value = TypeVar("Value")
Parts = list[tuple[Tensor, Batch]]

# A token's products with the weights of a layer (width w) cost 24·w² operations, its attention to
# half of the t tokens 2·w·t: of t = 12·w tokens both cost the same. This is that of w = 1024.
ATTENTION_COSTS_AS_MUCH = 12_288


@dataclass(frozen=True)
class Ranks:
    """One of ``size`` ranks; torch.distributed connects them where there are several.

    >>> ALONE.agree(True), ALONE.each("this rank's"), ALONE.total(torch.tensor(2.0))
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

    def agree(self, yes: bool) -> bool:
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

    A sequence of t tokens costs ``t + t² / 12,288``: products with the weights, and attention. It
    costs its prompt only once in each rank. The longest come first, each to where least is done.

    >>> mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    >>> shares(Batch(tokens=mask.long(), mask=mask), 2)
    [[0], [1, 2]]
    """
    found = spans(batch.host)
    real = batch.host.mask if batch.host.attention is None else batch.host.attention
    lengths = (real * torch.arange(1, real.shape[1] + 1)).amax(dim=1).tolist()
    groups = batch.need("groups").tolist() if keep_groups else range(len(lengths))
    units: dict[int, list[int]] = {}
    for row in batch.host.active.any(dim=1).nonzero()[:, 0].tolist():
        units.setdefault(groups[row], []).append(row)
    held: list[set[int]] = [set() for _ in range(size)]
    loads = [0.0] * size
    rows: list[list[int]] = [[] for _ in range(size)]

    def added(unit: list[int], rank: int) -> float:
        tokens = sum(lengths[row] + lengths[row] ** 2 / ATTENTION_COSTS_AS_MUCH for row in unit)
        known = [row for row in unit if found.owner[row] in held[rank]]
        return tokens - sum(found.first[row] for row in known)

    for unit in sorted(units.values(), key=lambda unit: -sum(lengths[row] for row in unit)):
        rank = min(range(size), key=lambda rank: loads[rank] + added(unit, rank))
        loads[rank] += added(unit, rank)
        held[rank].update(found.owner[row] for row in unit)
        rows[rank] += unit
    return [sorted(mine) for mine in rows]


def cheapest(batch: Batch, *, keep_groups: bool = False) -> Batch:
    """The beginning of the shortest sequence (or the shortest group), with weights of 0.

    For a pass that must be made and must not count.
    """
    active = batch.host.active
    real = batch.host.mask if batch.host.attention is None else batch.host.attention
    lengths = real.sum(dim=1).where(active.any(dim=1), torch.iinfo(torch.long).max)
    row = int(lengths.argmin())
    chosen = torch.tensor([row])
    if keep_groups:
        groups = batch.host.need("groups")
        sizes = {
            int(group): int(real[groups == group].sum())
            for group in groups[active.any(dim=1)].unique()
        }
        chosen = (groups == min(sizes, key=lambda group: sizes[group])).nonzero()[:, 0]
        width = int((real[chosen] * torch.arange(1, real.shape[1] + 1)).amax())
    else:
        width = int(active[row].long().argmax()) + 1
    part = batch.select(chosen).trim(width)
    return part if part.weights is None else part.replace(weights=torch.zeros_like(part.weights))
