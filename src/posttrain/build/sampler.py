"""What samples: the engine of a recipe, and batches that run ahead of learning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from posttrain.build.setup import Setup, choose_compile
from posttrain.config import RlSection
from posttrain.data.template import Template
from posttrain.models.adapters import copy_of_trained
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Sync
from posttrain.registry import Spec, look_up, options, resolve, split
from posttrain.rollout.engines import ENGINES
from posttrain.rollout.engines.weight_sync import shares_any_storage
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected, Sampling

SAME_PROCESS = ("native", "transformers")
FLOAT32_ROUNDING, OTHER_ROUNDING = 1e-3, 0.05  # of log-probs, between engine and learner


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What the loop is fed with; in ``idle()`` engine and scorer are the caller's alone.

    ``waiting()`` are the batches that are sampled and not yet learned.
    """

    batches: Iterable[Collected]
    sync: Sync
    idle: Callable[[], AbstractContextManager[None]]
    waiting: Callable[[], list[Collected]] = list


def make_engine(
    spec: Spec | None,
    policy: Policy,
    *,
    template: Template,
    compute: str = "auto",
    compiled: bool = False,
    temperature: float = 1.0,
    folder: str | None = None,
) -> Engine:
    """The engine a recipe names, sampling from this policy's own weights in its own precision.

    What the recipe does not say of it is filled in where its signature asks for it: ``compute``,
    ``compiled``, the ``temperature`` of the learner's log-probs, and a ``folder`` for files.
    """
    name, given = split(spec or "native", kind="engine")
    asked = options(look_up(name, ENGINES, kind="engine"))
    if "compute" in asked and given.get("compute", "auto") == "auto":
        given["compute"] = compute
    if "compiled" in asked and compiled:
        given["compiled"] = True
    facts = {"temperature": temperature, "folder": folder}
    given = {key: value for key, value in facts.items() if key in asked} | given
    spec = {"name": name, **given}
    engine: Engine = resolve(spec, ENGINES, kind="engine")(policy, template.decode)
    missing = [each for each in ("generate", "sync", "close") if not hasattr(engine, each)]
    if missing:
        raise ValueError(
            f"engine {name!r}: a {type(engine).__name__} has no {' and no '.join(missing)}; "
            "docs/engines.md shows a whole engine"
        )
    return engine


def until_done(
    engine: Engine, *, given: Engine | None = None
) -> contextlib.AbstractContextManager[Engine]:
    """Closes an engine behind the job it was made for; a ``given`` one is its owner's to close."""
    return contextlib.nullcontext(engine) if engine is given else contextlib.closing(engine)


def make_sampling(rl: RlSection) -> Sampling:
    """How the RL stage draws tokens."""
    return Sampling(
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        top_k=rl.top_k,
        top_p=rl.top_p,
        stop=tuple(rl.stop),
    )


def make_sampler(setup: Setup) -> Engine:
    """The engine of the RL stage.

    It samples from the learner's own module, unless it is to run ahead: then from a copy of it. An
    engine that was handed over is taken as it is, and those of a cluster have weights of their own.
    """
    section, own, given = setup.recipe.rl, setup.policy, setup.engine
    if given is None and (elsewhere := _elsewhere(setup)):
        return elsewhere
    if section.ahead and given is None:
        own = replace(own, model=copy_of_trained(own.model))
    elif section.ahead and _share(given, own):
        raise ValueError(
            f"rl.max_lag: the engine that was handed over ({type(given).__name__}) samples from "
            "the very weights that are trained, which would change while it samples; name it in "
            "rl.engine, so that it is made on a copy of them, or set rl.max_lag to 0"
        )
    return given or make_engine(
        section.engine,
        own,
        template=setup.template,
        compute=setup.recipe.model.compute,
        compiled=choose_compile(setup.recipe, setup.device),
        temperature=section.temperature,
        folder=_place(setup),
    )


def make_plain_sampler(setup: Setup) -> Engine:
    """The engine that ``[rl]`` names, for who samples from this policy without training it."""
    rl = setup.recipe.for_evaluations
    return _elsewhere(setup) or make_engine(
        None if rl is None else rl.engine,
        setup.policy,
        template=setup.template,
        compute=setup.recipe.model.compute,
        temperature=1.0 if rl is None else rl.temperature,
        folder=_place(setup),
    )


def _place(setup: Setup) -> str | None:
    """The run folder, once it is there, for an engine that hands weights over in files."""
    folder = Path(setup.recipe.run.folder)
    return str(folder) if folder.is_dir() else None


def _elsewhere(setup: Setup) -> Engine | None:
    """The engines of the setup's cluster, where it has some."""
    asked = setup.recipe.cluster
    if setup.cluster is None or asked is None or not asked.engines:
        return None
    return setup.cluster.make_engine(setup)


def in_process(setup: Setup) -> bool:
    """Whether an engine of our own samples, in this process: its log-probs are the learner's."""
    name, _ = split(setup.recipe.rl.engine or "native", kind="engine")
    return name in SAME_PROCESS and (setup.engine is None or setup.member is not None)


def _share(engine: object, policy: Policy) -> bool:
    model = getattr(engine, "model", None)
    if not isinstance(model, torch.nn.Module):
        return False
    own, trained = dict(model.named_parameters()), dict(policy.model.named_parameters())
    return shares_any_storage(own, trained)


@contextlib.contextmanager
def flowing(
    batches: Iterator[Collected],
    sync: Sync,
    *,
    ahead: int,
    device: torch.device,
    waiting: Sequence[Collected] = (),
) -> Iterator[Flow]:
    """The batches, ``ahead`` updates before they are learned; with 0, each when it is asked for.

    ``waiting`` come first: a run that goes on had them sampled already.
    """
    if ahead == 0:
        yield Flow(batches=batches, sync=sync, idle=contextlib.nullcontext)
        return
    with RunAhead(batches, sync, max_lag=ahead, device=device, waiting=waiting) as running:
        yield Flow(batches=running, sync=running.sync, idle=running.idle, waiting=running.waiting)
