"""Sampling beside learning: an engine with weights of its own, and batches that run ahead."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from posttrain.build.setup import Parts, choose_compile, make_engine
from posttrain.config import Resolved
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Sync
from posttrain.rollout.engines.weights import share
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What the loop is fed with; in ``idle()`` engine and scorer are the caller's alone.

    ``waiting()`` are the batches that are sampled and not yet learned.
    """

    batches: Iterable[Collected]
    sync: Sync
    idle: Callable[[], AbstractContextManager[None]]
    waiting: Callable[[], list[Collected]] = list


def make_sampler(
    recipe: Resolved, policy: Policy, *, parts: Parts, engine: Engine | None = None
) -> Engine:
    """The engine of the RL stage.

    It samples from the learner's own module, unless it is to run ahead: then from a copy of it. An
    ``engine`` that is handed over is taken as it is.
    """
    section = recipe.rl
    own = policy
    if section.max_lag and engine is None:
        own = replace(policy, model=copy.deepcopy(policy.model))
    elif section.max_lag and _share(engine, policy):
        raise ValueError(
            f"rl.max_lag: the engine that was handed over ({type(engine).__name__}) samples from "
            "the very weights that are trained, which would change while it samples; name it in "
            "rl.engine, so that it is made on a copy of them, or set rl.max_lag to 0"
        )
    return engine or make_engine(
        section.engine,
        own,
        template=parts.template,
        compute=recipe.model.compute,
        compiled=choose_compile(recipe, parts.device),
    )


def _share(engine: object, policy: Policy) -> bool:
    model = getattr(engine, "model", None)
    if not isinstance(model, torch.nn.Module):
        return False
    return share(dict(model.named_parameters()), dict(policy.model.named_parameters()))


@contextlib.contextmanager
def flowing(
    batches: Iterator[Collected],
    sync: Sync,
    *,
    max_lag: int,
    device: torch.device,
    waiting: Sequence[Collected] = (),
) -> Iterator[Flow]:
    """The batches, ``max_lag`` updates ahead of learning; with 0, each when it is asked for.

    ``waiting`` come first: a run that goes on had them sampled already.
    """
    if max_lag == 0:
        yield Flow(batches=batches, sync=sync, idle=contextlib.nullcontext)
        return
    with RunAhead(batches, sync, max_lag=max_lag, device=device, waiting=waiting) as ahead:
        yield Flow(batches=ahead, sync=ahead.sync, idle=ahead.idle, waiting=ahead.waiting)
