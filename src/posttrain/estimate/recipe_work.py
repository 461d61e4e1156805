"""From a recipe to the work of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from posttrain.build.learners import make_reference
from posttrain.build.sampler import SAME_PROCESS
from posttrain.build.setup import choose_compile, choose_compute
from posttrain.config import Resolved
from posttrain.estimate.work import Work
from posttrain.models.adapters import AdapterSettings
from posttrain.models.outline import find_config
from posttrain.registry import split


def work_of(
    recipe: Resolved, *, device: str, prompt_tokens: int, shape: Mapping[str, Any] | None = None
) -> Work:
    """The work of a step of [rl] on one device; ``shape`` are the sizes of an absent model."""
    rl, model = recipe.rl, recipe.model
    engine, options = split(rl.engine or "native", kind="engine")
    elsewhere = recipe.cluster is not None and recipe.cluster.engines > 0
    teacher = recipe.teacher.model if recipe.teacher is not None else ""
    kind = cast(Literal["cuda", "cpu"], device)
    return Work(
        config=find_config(model.name, options=model.options, shape=shape),
        dtype=model.dtype,
        device=kind,
        compute=choose_compute(model, device) if kind == "cuda" else torch.float32,
        compiled=choose_compile(recipe, device),
        prompts=rl.prompts_per_step,
        group=rl.group_size,
        prompt_tokens=prompt_tokens,
        new_tokens=rl.max_new_tokens,
        minibatches=rl.minibatches,
        epochs=rl.epochs,
        max_lag=rl.max_lag,
        micro_batch_tokens=rl.micro_batch_tokens,
        adapter=AdapterSettings(**dict(recipe.adapter)) if recipe.adapter.rank else None,
        moments=rl.adam_moments,
        checkpointed=rl.checkpoint_activations,
        reference=make_reference(rl.kl),
        critic=None if rl.critic is None else rl.critic.kind,
        teacher=find_config(teacher) if teacher else None,
        teacher_dtype=recipe.teacher.dtype if recipe.teacher is not None else "float32",
        samples_here=engine in SAME_PROCESS and not elsewhere,
        sequences_at_once=options.get("max_sequences"),
    )
