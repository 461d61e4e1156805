"""What the rules of a diagnosis have to know about a run beside its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.build.questions import shared_prompts
from posttrain.build.sampler import FLOAT32_ROUNDING, OTHER_ROUNDING, in_process
from posttrain.build.setup import Setup, choose_compute
from posttrain.config import to_dict
from posttrain.protocols import Tracker
from posttrain.registry import dotted
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import RunFolder, StageFolder
from posttrain.runs.resume import read_before
from posttrain.track import Several, Telling
from posttrain.track.diagnosis import FILE_NAME, Background, Diagnosing

DIAGNOSED = ("sft", "reward", "dpo", "rl")  # while they go on; eval is judged at its end


def diagnosed(
    trackers: Sequence[Tracker], folder: StageFolder, *, background: Background
) -> Diagnosing:
    """The trackers of a stage as one that also says what goes wrong; it knows what was logged."""
    tell = [tracker.note for tracker in trackers if isinstance(tracker, Telling)]
    known = read_before(folder) if background.stage == "rl" else None
    before = held_out(known, background) if known is not None else None
    tracker = Diagnosing(
        Several(trackers), folder.path, background=background, tell=tell, before=before
    )
    tracker.replay(folder.records())
    return tracker


def make_background(setup: Setup, *, stage: str = "", steps_per_epoch: int = 0) -> Background:
    """What is known of a run, in one of its stages."""
    recipe, task, scorer = setup.recipe, setup.task, setup.scorer
    rewards = scorer.rewards if isinstance(scorer, RewardScorer) else ()
    rl = recipe.rl if "rl" in recipe.stages else None
    last = recipe.eval if "eval" in recipe.stages else None
    test = len(task.prompts("test")) if task is not None else 0
    return Background(
        stage=stage,
        stages=tuple(recipe.stages),
        decides=setup.marks.check,
        weights={r.name: r.weight for r in rewards if r.weight or _watched(setup, r.name)},
        full=setup.marks.full,
        critic_warmup=rl.critic.warmup_steps if rl is not None and rl.critic is not None else 0,
        rounding=_rounding(setup) if rl is not None else math.inf,
        num_prompts=len(task.prompts("train")) if task is not None else 0,
        prompts_per_step=rl.prompts_per_step if rl is not None else 0,
        num_problems=min(test, rl.evaluate_problems) if rl and rl.evaluate_every else test,
        num_eval_problems=min(test, last.problems if last is not None else test),
        shared_prompts=bool(shared_prompts(recipe, task)),
        steps_per_epoch=steps_per_epoch,
        keys=dotted(to_dict(recipe)),
    )


def _watched(setup: Setup, name: str) -> bool:
    """Whether a reward of weight 0 is to warn: the check, one of the recipe, or a task's goal.

    What a task itself gives weight 0, such as the form of an answer, is only shown.
    """
    own = setup.task.rewards.get(name, 1.0) if setup.task is not None else 1.0
    shown = own.get("weight", 1.0) == 0 if isinstance(own, Mapping) else own == 0
    return name == setup.marks.check or name in setup.recipe.rewards or not shown


def held_out(found: Mapping[str, Any], background: Background) -> dict[str, float]:
    """An evaluation of the stage eval as the metrics that one within rl logs."""
    problems = float(background.num_eval_problems)
    metrics = {"eval/reward": found["reward"], "eval/problems": problems}
    accuracy = found["estimates"].get("accuracy")
    if accuracy is not None:
        metrics["eval/accuracy"] = accuracy["value"]
    return metrics | {f"eval/part/{name}": value for name, value in found["parts"].items()}


def verdict_metrics(verdict: Mapping[str, Any]) -> dict[str, float]:
    """What a reward model is worth, as metrics that rules read."""
    found = {"verdict/pairs": float(verdict["num_pairs"])}
    return found | {"verdict/length_correlation": float(verdict["length_correlation"])}


def judge_outcome(run: RunFolder, after: Mapping[str, Any], *, background: Background) -> None:
    """Compare the end of a run with its beginning; findings go to the folder of the stage eval."""
    rl, folder = run.stage("rl"), run.stage("eval")
    before = (run.stage_record("rl") or {}).get("before")
    same = (before or {}).get("of") == after["of"]
    (folder.path / FILE_NAME).unlink(missing_ok=True)
    judge = Diagnosing(
        Several([]),
        folder.path,
        background=background,
        before=held_out(before, background) if before is not None and same else None,
        known=[finding["finding"] for finding in rl.findings() if finding["until"] is None],
    )
    for record in rl.records():
        judge.recall(record)
    judge.finish(held_out(after, background))


def _rounding(setup: Setup) -> float:
    """How far the log-probs of engine and trainer may lie apart where nothing is wrong."""
    section = setup.recipe.rl
    if section.top_k or section.top_p < 1:
        return math.inf  # the engine samples from less than the whole distribution, on purpose
    if section.max_lag:
        return math.inf  # the engine samples from older weights, on purpose
    exact = choose_compute(setup.recipe.model, setup.device) is torch.float32
    return FLOAT32_ROUNDING if exact and in_process(setup) else OTHER_ROUNDING
