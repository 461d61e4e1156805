"""The stage ``sft``: supervised training on demonstrations, and its loss on held-out ones."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import takewhile
from typing import Any

from posttrain.build.cluster import stage_learner
from posttrain.build.declared_ways import Ways, declared
from posttrain.build.setup import Setup
from posttrain.build.sft_rows import SftRows, fitting, sft_rows
from posttrain.learn.best import Best
from posttrain.pipelines.fit import fit, num_steps
from posttrain.pipelines.likelihood import batches, held_out_loss, likelihood
from posttrain.protocols import Learner
from posttrain.report.plot import plot_curves
from posttrain.runs import StageFolder
from posttrain.stages.evaluation import answers
from posttrain.stages.guards import guard_learner
from posttrain.stages.job import Job
from posttrain.stages.open_stage import OpenStage, evaluation_interval, logged
from posttrain.track.progress import phase

TEST_LOSS = "test/loss"


def run_sft(setup: Setup, job: Job) -> dict[str, Any]:
    """Supervised fine-tuning; what the stage's record says."""
    section = setup.recipe.sft
    rows = fitting(sft_rows(setup), setup.policy, section=section)
    if rows.note:
        job.say(rows.note)
    size, count = section.batch_size, len(rows.train)
    total_steps = num_steps(count, size, epochs=section.epochs, steps=section.steps)
    with job.stage("sft", total_steps=total_steps) as stage:
        return _learn(setup, stage, rows=rows, total_steps=total_steps)


def _learn(setup: Setup, stage: OpenStage, *, rows: SftRows, total_steps: int) -> dict[str, Any]:
    recipe, policy, keeper = setup.recipe, setup.policy, stage.keeper
    section = recipe.sft
    learner = stage_learner(setup, "sft", total_steps=total_steps)
    longest = max((len(row[0]) for row in rows.train), default=1)
    Ways(keeper, lambda: declared(setup, learner, longest=longest))
    keeper.restore(learner)
    guarded = guard_learner(learner, section, keeper=keeper, decode=setup.template.decode)
    best = Best(learner, last_step=total_steps)
    if (begins_at := keeper.begins_at) is not None:
        best.restore(begins_at.path, begins_at.state["held_out"], step=begins_at.step)
    epoch, asked = num_steps(len(rows.train), section.batch_size, epochs=1), section.evaluate_every
    every = evaluation_interval(keeper, asked or None, total_steps=total_steps, epoch=epoch)
    patience = (section.patience or total_steps + 1) * every  # in steps

    def measured(step: int) -> dict[str, float]:
        if not rows.test or (step % every and step != total_steps):
            return {}
        loss = held_out_loss(rows.test, learner, pad_token=policy.pad_token)
        best.saw(step, loss)
        return {TEST_LOSS: loss}

    on_step = logged(
        stage,
        guarded,
        every=section.save_every,
        total_steps=total_steps,
        measured=lambda step: {
            "sft/tokens": float(step.batch.mask.sum()),
            **measured(step.step),
            **setup.cluster_metrics(),
        },
        measured_every=every,
        more=best.keep,
    )
    stage.callbacks.generate = partial(answers, setup, learner=learner)
    with keeper.stepping():
        if rows.test and not keeper.step:
            stage.tracker.log(0, measured(0))
        chosen = batches(
            rows.train,
            section.batch_size,
            steps=total_steps,
            pad_token=policy.pad_token,
            seed=recipe.run.seed,
            start=keeper.step,
        )
        patient = takewhile(lambda _: best.steps_since < patience, chosen)
        wanted = stage.callbacks.until_ended(patient)
        fit(wanted, guarded, objective=likelihood, on_step=on_step, start=keeper.step)
    with phase("saving the model"):
        _save(stage.folder, learner, best=best, result=section.result)
        picture = stage.folder.path / "curves.png"
        plot_curves(stage.folder.records(), picture, title="Supervised fine-tuning")
    found: dict[str, Any] = {"demonstrations": len(rows.train)}
    if best.steps_since >= patience:
        found["stopped_at"] = best.record()["last"]["step"]
        lowest = f"the held-out loss was lowest at step {best.record()['best']['step']}"
        keeper.info(f"sft stops at step {found['stopped_at']} of {total_steps}: {lowest}")
    return {**found, "held_out": len(rows.test), **best.record()} if rows.test else found


def _save(folder: StageFolder, learner: Learner, *, best: Best, result: str) -> None:
    """Write the model that the section asks for; and the best one, where that is another."""
    shutil.rmtree(folder.best, ignore_errors=True)  # of an attempt that was cut short
    if result == "best":
        best.exchange()
    learner.save(folder.model)
    if result == "last" and best.is_lost:
        best.exchange()
        learner.save(folder.best / "model")
        best.exchange()
