"""Learning in several threads of a CPU at once, each with a replica of the model.

What a small model computes in one operation is too little to be shared among threads: after each
they wait for each other, and for long where another process has one of their cores. Whole passes
are not. A replica has the same weights, in the same memory, and gradients of its own, which are
added in a fixed order: the result depends on how many replicas there are by rounding alone, and not
on which of them is the first to be done. The plain twin is one pass after the other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig

from posttrain.cpu_threads import single_threads
from posttrain.models.head import HOOKS

Share = TypeVar("Share")
Result = TypeVar("Result")

LARGE = 2**17  # weights of a matrix, on average, from which threads share its products well
MOST = 8  # threads of a large machine: with more of them the shares of a batch are small
KNOWN = {"posttrain", "torch", "transformers", "functools"}  # packages whose code is as wanted here
# What is attached to modules and weights, beside a forward of their own: copies lack some of it.
ATTACHED = (*HOOKS, "_post_accumulate_grad_hooks", "_compiled_call_impl")
# Attributes of modules that each replica has for itself; others are the same ones.
COPIED = (nn.Module, PretrainedConfig, SimpleNamespace, MethodType, dict, list, tuple, set)


class Replicas:
    """A model, and others that share its weights."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.count = count
        self.model = model
        self._threads: Executor | None = None

    def take(self, function: Callable[..., Any]) -> bool:
        """Whether several threads may call this function on replicas of the model as it is now.

        One of a user's may keep a state or draw random numbers, in the order in which it is called;
        so may a model with hooks or a forward that was put in place of its class's, or one in
        training mode, which has dropout. Autocast around the call would hold in this thread alone.
        """
        modules = list(self.model.modules())
        parts = (*modules, *self.model.parameters())
        unlike = (
            any(getattr(part, name, None) for part in parts for name in ATTACHED),
            any("forward" in vars(module) or module.training for module in modules),
            nn.modules.module._has_any_global_hook(),
            torch.is_autocast_enabled("cpu"),
        )
        return not any(unlike) and is_known(function)

    def each(
        self, work: Callable[[nn.Module, Share], Result], shares: Sequence[Share]
    ) -> list[Result]:
        """``work`` on every share with a model of its own, at the same time; in their order.

        Gradients are those of the model afterwards. There are at most ``count`` shares. Each thread
        begins with torch's defaults: what is local to a thread, as autocast is, ``work`` must set.
        """
        if self._threads is None:
            self._threads = single_threads(self.count)
        # Made anew each time, in milliseconds: whatever was changed in the model, they have it too.
        models = [self.model, *(sharing_weights(self.model) for _ in shares[1:])]
        running = [
            self._threads.submit(work, model, share)
            for model, share in zip(models, shares, strict=True)
        ]
        try:
            wait(running)  # for all, also where one of them has failed
        except BaseException:  # an interrupt: what still runs would add to the next gradient
            for one in running:
                one.cancel()
            wait(running)
            raise
        found = [one.result() for one in running]
        for other in models[1:]:
            _add_gradients(self.model, other)
        return found


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with the same weights and buffers, in the same memory.

    Those that learn are parameters of its own, for their gradients; the others are the same ones,
    and so is what a user has attached: a tokenizer, a lock, a tensor with its graph.
    """
    held: list[Any] = [vars(module) for module in model.modules()]
    opened = set[int]()
    for value in held:  # which grows by what containers have inside
        if isinstance(value, dict | list | tuple | set) and id(value) not in opened:
            opened.add(id(value))
            held += value.values() if isinstance(value, dict) else value
    shared = (value for value in held if not isinstance(value, COPIED))
    known: dict[int, Any] = {
        id(kept): kept for kept in (*shared, *model.buffers(), *model.parameters())
    }
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


def is_known(function: Callable[..., Any]) -> bool:
    """Whether a function is of this library or of PyTorch, and so are those that it is given.

    >>> is_known(functools.partial(copy.copy)), is_known(functools.partial(nn.functional.relu))
    (False, True)
    """
    if isinstance(function, functools.partial):
        given = (function.func, *function.args, *function.keywords.values())
        return all(is_known(one) for one in given if callable(one))
    written = getattr(function, "__globals__", {}).get("__name__")  # of what may be around it
    named = getattr(function, "__module__", None)  # functools.wraps copies that
    homes = [home for home in (written, named) if home] or [type(function).__module__]
    return all(home.split(".")[0] in KNOWN for home in homes)


def replicas_for(model: nn.Module, threads: int) -> int:
    """How many replicas of a model learn at the same time, where there are so many threads.

    More than one on a CPU, where matrices are small, and only of a model of transformers: another
    one may have what cannot be copied.
    """
    sizes = [weight.numel() for weight in model.parameters() if weight.ndim > 1]
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    known = all(is_known(type(module)) for module in model.modules())
    return min(threads, MOST) if on_cpu and known and sum(sizes) < LARGE * len(sizes) else 1
