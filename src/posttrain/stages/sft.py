"""The stage ``sft``: supervised training on demonstrations, and its loss on held-out ones."""

from __future__ import annotations

import shutil
from typing import Any

from posttrain.build.declared_ways import tell_ways
from posttrain.build.learners import make_learner
from posttrain.build.sft_rows import SftRows
from posttrain.config import Resolved
from posttrain.learn.learner import LocalLearner
from posttrain.pipelines import supervised
from posttrain.pipelines.fit import fit, num_steps
from posttrain.pipelines.guard import Guarded
from posttrain.report.plot import plot_curves
from posttrain.stages.best import Best
from posttrain.stages.guards import make_guard
from posttrain.stages.rl import Context, logged
from posttrain.track.progress import phase

TEST_LOSS = "test/loss"
EVALUATIONS = 10  # in a stage, about, where the recipe does not say how often


def sft_steps(recipe: Resolved, num_rows: int) -> int:
    """Optimiser steps of the SFT stage."""
    section = recipe.sft
    return num_steps(num_rows, section.batch_size, epochs=section.epochs)


def evaluation_steps(total_steps: int, *, epochs: int) -> int:
    """Steps between evaluations: about ten in the stage, and at least one an epoch.

    >>> [evaluation_steps(total, epochs=epochs) for total, epochs in ((500, 1), (500, 50), (3, 1))]
    [50, 10, 1]
    """
    return max(1, min(total_steps // EVALUATIONS, total_steps // epochs))


def run_sft(context: Context, rows: SftRows) -> dict[str, Any]:
    """Supervised fine-tuning; what the stage's record says."""
    recipe, policy = context.recipe, context.policy
    section, keeper = recipe.sft, context.keeper
    total_steps = sft_steps(recipe, len(rows.train))
    learner = make_learner(
        recipe, policy, section=section, device=context.parts.device, total_steps=total_steps
    )
    tell_ways(context, learner, longest=max((len(row[0]) for row in rows.train), default=1))
    keeper.restore(learner)
    guard = make_guard(section, context.folder.path, decode=context.parts.template.decode)
    best = Best(learner, last_step=total_steps)
    best.take_up(keeper.begins_at)
    every = section.evaluate_every or evaluation_steps(total_steps, epochs=section.epochs)

    def measured(step: int) -> dict[str, float]:
        if not rows.test or (step % every and step != total_steps):
            return {}
        loss = supervised.held_out_loss(rows.test, learner, pad_token=policy.pad_token)
        best.saw(step, loss)
        return {TEST_LOSS: loss}

    on_step = logged(
        context,
        learner,
        guard=keeper.keep(guard),
        every=section.save_every,
        total_steps=total_steps,
        measured=lambda step: {"sft/tokens": float(step.batch.mask.sum()), **measured(step.step)},
        more=best.keep,
    )
    with keeper.stepping():
        if rows.test and not keeper.step:
            context.tracker.log(0, measured(0))
        batches = supervised.batches(
            rows.train,
            section.batch_size,
            epochs=section.epochs,
            pad_token=policy.pad_token,
            seed=recipe.run.seed,
            start=keeper.step,
        )
        fit(
            batches,
            Guarded(learner, guard),
            objective=supervised.likelihood,
            on_step=on_step,
            start=keeper.step,
        )
    with phase("saving the model"):
        _save(context, learner, best=best)
        picture = context.folder.path / "curves.png"
        plot_curves(context.folder.records(), picture, title="Supervised fine-tuning")
    record: dict[str, Any] = {"demonstrations": len(rows.train)}
    return {**record, "held_out": len(rows.test), **best.record()} if rows.test else record


def _save(context: Context, learner: LocalLearner, *, best: Best) -> None:
    """Write the model that the section asks for; and the best one, where that is another."""
    folder, result = context.folder, context.recipe.sft.result
    shutil.rmtree(folder.best, ignore_errors=True)  # of an attempt that was cut short
    if result == "best":
        best.exchange()
    learner.save(folder.model)
    if result == "last" and best.is_lost:
        best.exchange()
        learner.save(folder.best / "model")
        best.exchange()
