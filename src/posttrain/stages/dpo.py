"""The stage ``dpo``: the policy learns from preferences, and is measured by those held out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.algorithms.pieces import needed
from posttrain.build.cluster import stage_learner
from posttrain.build.declared_ways import Ways, declared
from posttrain.build.preference_rows import direct_loss, direct_rows
from posttrain.build.setup import Setup
from posttrain.pipelines.direct_preference import (
    Preferences,
    batches,
    held_out,
    num_tokens,
    objective,
    reference_logprobs,
    strangers,
)
from posttrain.pipelines.fit import fit, num_steps
from posttrain.protocols import Learner
from posttrain.runs.files import read_json, replacing, write_sealed
from posttrain.stages.evaluation import answers
from posttrain.stages.guards import guard_learner
from posttrain.stages.job import Job
from posttrain.stages.open_stage import OpenStage, evaluation_interval, logged
from posttrain.track.progress import phase

REFERENCE = "reference.npy"  # log-probs, by the token; beside it what they are of, and their hash


def run_dpo(setup: Setup, job: Job) -> dict[str, Any]:
    """Learn from preferences without a reward model; what the stage's record says."""
    recipe, section = setup.recipe, setup.recipe.dpo
    train, test = direct_rows(setup, prefer=job.folder.stage("prefer").path)
    most = min(section.evaluate_preferences, len(test))
    chosen = random.Random(recipe.run.seed).sample(range(len(test)), most)
    parts = {
        "train": Preferences(sets=train, pad_token=setup.policy.pad_token),
        "test": Preferences(
            sets=[test[place] for place in sorted(chosen)], pad_token=setup.policy.pad_token
        ),
    }
    size, count = section.batch_size, len(train)
    total_steps = num_steps(count, size, epochs=section.epochs, steps=section.steps)
    with job.stage("dpo", total_steps=total_steps) as stage:
        return _learn(setup, stage, parts=parts, total_steps=total_steps)


def _learn(
    setup: Setup, stage: OpenStage, *, parts: Mapping[str, Preferences], total_steps: int
) -> dict[str, Any]:
    recipe, section, keeper = setup.recipe, setup.recipe.dpo, stage.keeper
    loss = direct_loss(recipe)
    learner = stage_learner(setup, "dpo", total_steps=total_steps)
    longest = max(len(row) for ranked in parts["train"].sets for row in ranked.rows)
    Ways(keeper, lambda: declared(setup, learner, longest=longest))
    # Before the learner is restored: its weights are the reference's.
    train, test = with_reference(parts, learner, needs=needed(loss), folder=stage.folder.path)
    keeper.restore(learner)
    guarded = guard_learner(learner, section, keeper=keeper, decode=setup.template.decode)
    epoch, asked = num_steps(len(train.sets), section.batch_size, epochs=1), section.evaluate_every
    every = evaluation_interval(keeper, asked, total_steps=total_steps, epoch=epoch)

    def measured(step: int) -> Mapping[str, float]:
        if step and step != total_steps and not (every and step % every == 0):
            return {}
        return held_out(test, learner, loss=loss)

    on_step = logged(
        stage,
        guarded,
        every=section.save_every,
        total_steps=total_steps,
        measured=lambda step: {**measured(step.step), **setup.cluster_metrics()},
        measured_every=every,
    )
    stage.callbacks.generate = partial(answers, setup, learner=learner)
    with keeper.stepping():
        if not keeper.step:
            stage.tracker.log(0, measured(0))
        rows = batches(
            train,
            section.batch_size,
            learner=learner,
            steps=total_steps,
            seed=recipe.run.seed,
            start=keeper.step,
        )
        rows = stage.callbacks.until_ended(rows)
        fit(rows, guarded, objective=objective(loss), on_step=on_step, start=keeper.step)
    with phase("saving the model"):
        learner.save(stage.folder.model)
    last = {name.partition("/")[2]: value for name, value in measured(total_steps).items()}
    return {"train_sets": len(train.sets), "test_sets": len(test.sets), "held_out": last}


def with_reference(
    parts: Mapping[str, Preferences], learner: Learner, *, needs: frozenset[str], folder: Path
) -> tuple[Preferences, ...]:
    """Each part with all that the loss needs of the reference, which is the learner as it is now.

    Its log-probs are computed once and kept in the folder; a stage that is resumed reads them.
    """
    made = dict(parts)
    if "ref_logprobs" not in needs:
        return tuple(made.values())
    if "baseline" in needs:
        for name, part in parts.items():
            made[f"{name} strangers"] = replace(part, sets=strangers(part.sets))
    rows = hashlib.sha256(repr([part.sets for part in made.values()]).encode()).hexdigest()
    flat = _kept(folder / REFERENCE, rows=rows)
    if flat is None:
        with phase("log-probs of the reference"):
            found = [reference_logprobs(part, learner) for part in made.values()]
        flat = torch.cat([logprobs for part in found for logprobs in part])
        _keep(flat, folder / REFERENCE, rows=rows)
    counts = [num_tokens(ranked) for part in made.values() for ranked in part.sets]
    left = list(flat.split(counts))
    for name, part in made.items():
        made[name] = replace(part, reference=left[: len(part.sets)])
        left = left[len(part.sets) :]
    return tuple(replace(made[name], strangers=made.get(f"{name} strangers")) for name in parts)


def _keep(flat: torch.Tensor, path: Path, *, rows: str) -> None:
    with replacing(path) as beside, beside.open("wb") as file:
        np.save(file, flat.numpy())
    write_sealed(path.with_suffix(".json"), {"rows": rows, "values": _digest(path)})


def _kept(path: Path, *, rows: str) -> torch.Tensor | None:
    """The log-probs that were kept of these rows; None where there are none."""
    noted = path.with_suffix(".json")
    known = read_json(noted) if noted.exists() else {}
    if known.get("rows") != rows or not path.exists():
        return None
    if known.get("values") != _digest(path):
        raise ValueError(
            f"{path}: has changed since it was written; put it back as it was, or remove it: the "
            "log-probs of the reference are then computed again"
        )
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
