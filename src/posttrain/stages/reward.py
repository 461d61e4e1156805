"""The stage ``reward``: a reward model from preferences, judged by those it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.build.cluster import stage_learner
from posttrain.build.preference_rows import backbone_of, reward_rows
from posttrain.build.setup import Setup, make_template
from posttrain.models.reward import RewardModel, reward_from_policy, save_reward, with_normalisation
from posttrain.models.reward_scorer import ModelScorer
from posttrain.pipelines.fit import fit, num_steps
from posttrain.pipelines.reward_model import (
    RankedTokens,
    RankingMetrics,
    batches,
    judge,
    preference,
)
from posttrain.report.plot import plot_calibration
from posttrain.runs.files import write_json
from posttrain.stages.diagnosis import verdict_metrics
from posttrain.stages.guards import guard_learner
from posttrain.stages.job import Job
from posttrain.stages.open_stage import OpenStage, logged


@dataclass(frozen=True, kw_only=True)
class _Learned:
    """A reward model that is yet to learn, and the preferences to learn and to be judged by."""

    reward: RewardModel
    train: Sequence[RankedTokens]
    test: Sequence[RankedTokens]


def run_reward(setup: Setup, job: Job) -> dict[str, Any]:
    """Train the reward model, judge it on what it has not seen, normalise and save it."""
    section = setup.recipe.reward
    learned = _prepare(setup, job.folder.stage("prefer").path)
    size, count = section.batch_size, len(learned.train)
    total_steps = num_steps(count, size, epochs=section.epochs, steps=section.steps)
    with job.stage("reward", total_steps=total_steps) as stage:
        found = _learn(setup, stage, learned=learned, total_steps=total_steps)
        stage.tell_rules(verdict_metrics(found["verdict"]))
        return found


def _prepare(setup: Setup, prefer: Path) -> _Learned:
    """The backbone with a new head, and the preferences in its tokens; ``prefer`` is that stage's.

    Everything that can be wrong with data or model is found here, before a step is taken.
    """
    recipe = setup.recipe
    backbone = backbone_of(recipe, setup.policy, device=setup.device)
    template = make_template(recipe, backbone)
    train, test = reward_rows(recipe, backbone, template=template, prefer=prefer)
    made = reward_from_policy(backbone, seed=recipe.run.seed)
    cut = any(row[-1] not in backbone.end_tokens for ranked in train for row in ranked.rows)
    made = replace(made, chat=bool(template.chat), knows_cut=cut)
    return _Learned(reward=made, train=train, test=test)


def _learn(
    setup: Setup, stage: OpenStage, *, learned: _Learned, total_steps: int
) -> dict[str, Any]:
    recipe, section, reward = setup.recipe, setup.recipe.reward, learned.reward
    keeper, folder = stage.keeper, stage.folder
    learner = stage_learner(setup, "reward", total_steps=total_steps, model=reward)
    keeper.restore(learner)
    guarded = guard_learner(learner, section, keeper=keeper, decode=reward.tokenizer.decode)
    on_step = logged(
        stage,
        guarded,
        every=section.save_every,
        total_steps=total_steps,
        measured=lambda step: setup.cluster_metrics(),
    )
    rows = batches(
        learned.train,
        section.batch_size,
        steps=total_steps,
        pad_token=reward.pad_token,
        seed=recipe.run.seed,
        start=keeper.step,
    )
    with keeper.stepping():
        rows = stage.callbacks.until_ended(rows)
        fit(rows, guarded, objective=preference, on_step=on_step, start=keeper.step)
    learner.weights()  # of one that learns elsewhere, they come here
    verdict = _judge(learned, learner.micro_batch_tokens)
    save_reward(with_normalisation(reward, verdict.scores), folder.model)
    found = _numbers(verdict)
    write_json(folder.path / "verdict.json", found)
    title = f"{verdict.num_pairs:,} held-out pairs, {verdict.accuracy:.1%} right"
    plot_calibration(verdict.bins, folder.path / "calibration.png", title=title)
    return {"train_sets": len(learned.train), "test_sets": len(learned.test), "verdict": found}


def _judge(learned: _Learned, micro_batch_tokens: int) -> RankingMetrics:
    scorer = ModelScorer(
        lambda: learned.reward,
        render=lambda reward, rollout: (),
        micro_batch_tokens=micro_batch_tokens,
    )
    scores = iter(scorer.raw([row for ranked in learned.test for row in ranked.rows]))
    grouped = [[next(scores) for _ in ranked.rows] for ranked in learned.test]
    return judge(learned.test, grouped)


def _numbers(verdict: RankingMetrics) -> dict[str, Any]:
    return {
        "accuracy": verdict.accuracy,
        "loss": verdict.loss,
        "margin": verdict.margin,
        "calibration_error": verdict.calibration_error,
        "length_correlation": verdict.length_correlation,
        "num_pairs": verdict.num_pairs,
        "calibration": [vars(found) for found in verdict.bins],
    }
