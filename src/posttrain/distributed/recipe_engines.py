"""The engines of a recipe in processes of their own: what each is made from, and their pool."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.build.sampler import FLOAT32_ROUNDING, OTHER_ROUNDING, SAME_PROCESS, make_engine
from posttrain.build.setup import (
    Setup,
    choose_compile,
    choose_compute,
    choose_device,
    make_policy,
    make_template,
)
from posttrain.config import Resolved
from posttrain.config.paths import import_from
from posttrain.distributed.engine_pool import EnginePool
from posttrain.distributed.pool_member import Probe
from posttrain.distributed.replica import RayReplica
from posttrain.distributed.spans import Spans
from posttrain.models.cache import context_length
from posttrain.protocols import Engine
from posttrain.registry import Spec, split
from posttrain.types import Prompt

__all__ = ["EnginePool", "EngineRequest", "make_engine_pool"]

PROBED = Prompt(id="probe", text="What is 2 + 2? The answer is")


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """All that another process must know to make an engine of a recipe; it pickles.

    ``model`` is a model folder that every process sees. Beside it, where all goes with the run,
    each engine has a folder for files of its own. Relative paths and modules of the user are looked
    for where the driver looks for them.
    """

    recipe: Resolved
    model: Path
    on_gpu: bool = False
    here: str = field(default_factory=os.getcwd)
    modules: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))

    def __call__(self) -> Engine:
        """The engine, on this process's device, with the weights of the folder."""
        if not self.on_gpu:  # Ray hides none from an actor that asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if os.path.isdir(self.here):
            os.chdir(self.here)
        import_from(*(Path(folder) for folder in self.modules if folder))
        cluster, threads = self.recipe.cluster, self.recipe.run.threads
        torch.set_num_threads(threads or max(1, int(cluster.cpus_per_engine if cluster else 1)))
        device = choose_device(self.recipe)
        policy = make_policy(self.recipe, str(self.model), device=device)
        return make_engine(
            engine_spec(self.recipe),
            policy,
            template=make_template(self.recipe, policy),
            compute=self.recipe.model.compute,
            compiled=choose_compile(self.recipe, device),
            temperature=_temperature(self.recipe),
            folder=tempfile.mkdtemp(prefix="files-", dir=self.model.parent),
        )


def engine_spec(recipe: Resolved) -> Spec:
    """What samples in each replica: ``rl.engine``, whose name may be that of ``cluster.engine``."""
    name = (recipe.cluster and recipe.cluster.engine) or "native"
    rl = recipe.for_evaluations
    given = (None if rl is None else rl.engine) or {}
    return given if "name" in given else {"name": name, **given}


def _temperature(recipe: Resolved) -> float:
    """That of the learner's log-probs, which an engine's are compared with."""
    rl = recipe.for_evaluations
    return 1.0 if rl is None else rl.temperature


def make_engine_pool(
    setup: Setup,
    places: Sequence[Mapping[str, Any]],
    *,
    model: Path,
    share: Callable[[Any], Any],
    say: Callable[[str], None],
    on_gpu: bool = False,
    spans: Spans | None = None,
) -> EnginePool:
    """The pool that samples for a setup, from the weights of a folder until the first sync.

    ``places`` are the options of Ray for the actor of each engine.
    """
    recipe = setup.recipe
    assert recipe.cluster is not None
    deadline = recipe.cluster.deadline
    name, _ = split(engine_spec(recipe), kind="engine")
    compute = choose_compute(recipe.model, setup.device)
    exact = compute is torch.float32 and recipe.model.dtype == "float32" and name in SAME_PROCESS
    return EnginePool(
        [
            RayReplica(f"engine {number}", deadline=deadline, **place)
            for number, place in enumerate(places)
        ],
        EngineRequest(recipe=recipe, model=model.resolve(), on_gpu=on_gpu),
        longest=context_length(setup.policy.model),
        probe=Probe(
            prompt=setup.template.render(PROBED),
            temperature=_temperature(recipe),
            tolerance=FLOAT32_ROUNDING if exact else OTHER_ROUNDING,
            pad_token=setup.policy.pad_token,
        ),
        deadline=deadline,
        share=share,
        say=say,
        spans=spans,
    )
