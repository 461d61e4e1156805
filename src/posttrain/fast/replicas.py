"""Learning in several threads of a CPU at once, each with a replica of the model.

What a small model computes in one operation is too little to be shared among threads: after each
they wait for each other, and for long where another process has one of their cores. Whole passes
are not. A replica has the same weights, in the same memory, and gradients of its own, which are
added in a fixed order: the result depends on how many replicas there are by rounding alone, and not
on which of them is the first to be done. The plain twin is one pass after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from typing import Any, TypeVar

from torch import nn

from posttrain.cpu_threads import single_threads
from posttrain.models.adapter_group import choice_of

Share = TypeVar("Share")
Result = TypeVar("Result")

SMALL = 2**17  # weights of a matrix, on average, from which threads share its products well
MOST = 8  # threads of a large machine: with more of them the shares of a batch are small


class Replicas:
    """A model, and others that share its weights."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.count = count
        self.model = model
        self._others: list[nn.Module] = []
        self._as_copied: Any = None
        self._threads: Executor | None = None

    def each(
        self, work: Callable[[nn.Module, Share], Result], shares: Sequence[Share]
    ) -> list[Result]:
        """``work`` on every share with a model of its own, at the same time; in their order.

        Gradients are those of the model afterwards. There are at most ``count`` shares. Each thread
        begins with torch's defaults: what is local to a thread, as autocast is, ``work`` must set.
        """
        if self._threads is None:
            self._threads = single_threads(self.count)
        models = [self.model, *self._copied()[: len(shares) - 1]]
        for other in models[1:]:
            other.zero_grad(set_to_none=True)
        running = [
            self._threads.submit(work, model, share)
            for model, share in zip(models, shares, strict=True)
        ]
        wait(running)  # for all, also where one of them has failed
        found = [one.result() for one in running]
        for other in models[1:]:
            _add_gradients(self.model, other)
        return found

    def _copied(self) -> list[nn.Module]:
        """The others, made anew where the model has other weights or another mode by now."""
        state = [(w.data_ptr(), w.requires_grad) for w in self.model.parameters()]
        modes = [module.training for module in self.model.modules()]
        if self._as_copied != (state, modes):
            self._others = [sharing_weights(self.model) for _ in range(1, self.count)]
            self._as_copied = (state, modes)
        return self._others


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with the same weights and buffers, in the same memory.

    Those that learn are parameters of its own, for their gradients; the others are the same ones.
    """
    known: dict[int, Any] = {id(kept): kept for kept in (*model.buffers(), *model.parameters())}
    for weight in model.parameters():
        if weight.requires_grad:
            known[id(weight)] = nn.Parameter(weight.detach())
    return copy.deepcopy(model, known)


def _add_gradients(model: nn.Module, other: nn.Module) -> None:
    for weight, replica in zip(model.parameters(), other.parameters(), strict=True):
        if replica.grad is None or replica is weight:
            continue
        if weight.grad is None:
            weight.grad = replica.grad
        else:
            weight.grad += replica.grad
        replica.grad = None


def takes_replicas(model: nn.Module) -> bool:
    """Whether whole passes at the same time are faster: on a CPU, where matrices are small.

    Not for several adapters beside one base: which of them computes is a state of the model.
    """
    sizes = [weight.numel() for weight in model.parameters() if weight.ndim > 1]
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return on_cpu and sum(sizes) < SMALL * len(sizes) and choice_of(model) is None


def replicas_for(model: nn.Module, threads: int) -> int:
    """How many replicas of a model learn at the same time, where there are so many threads."""
    return min(threads, MOST) if takes_replicas(model) else 1
