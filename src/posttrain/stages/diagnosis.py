"""What the rules of a diagnosis have to know about a run beside its numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.build.questions import shared_prompts
from posttrain.build.setup import Parts, choose_compute
from posttrain.config import Resolved, to_dict
from posttrain.protocols import Tracker
from posttrain.registry import split
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import RunFolder, StageFolder
from posttrain.runs.first_evaluation import read_before
from posttrain.track import ConsoleTracker, Several
from posttrain.track.diagnosis import FILE_NAME, Diagnosing, Setup

SAME_PROCESS = ("native", "transformers")
FLOAT32_ROUNDING, OTHER_ROUNDING = 1e-3, 0.05
DIAGNOSED = ("sft", "reward", "rl")  # while they go on; eval is judged at its end


def diagnosed(
    trackers: Sequence[Tracker],
    folder: StageFolder,
    *,
    stage: str,
    setup: Setup,
) -> Diagnosing:
    """The trackers of a stage as one that also says what goes wrong; it knows what was logged."""
    tell = [tracker.note for tracker in trackers if isinstance(tracker, ConsoleTracker)]
    known = read_before(folder) if stage == "rl" else None
    before = held_out(known, setup) if known is not None else None
    setup = dataclasses.replace(setup, stage=stage)
    tracker = Diagnosing(Several(trackers), folder.path, setup=setup, tell=tell, before=before)
    tracker.replay(folder.records())
    return tracker


def make_setup(
    recipe: Resolved, parts: Parts, *, steps_per_epoch: int = 0, supplied: bool = False
) -> Setup:
    """What is known of a run; ``supplied`` says that its engine was handed over as an object."""
    rewards = parts.scorer.rewards if isinstance(parts.scorer, RewardScorer) else ()
    rl = recipe.rl if "rl" in recipe.stages else None
    last = recipe.eval if "eval" in recipe.stages else None
    test = len(parts.task.prompts("test")) if parts.task is not None else 0
    return Setup(
        stages=tuple(recipe.stages),
        decides=parts.correct_by,
        weights={reward.name: reward.weight for reward in rewards},
        full=parts.marks.full,
        critic_warmup=rl.critic.warmup_steps if rl is not None and rl.critic is not None else 0,
        rounding=_rounding(recipe, parts.device, supplied=supplied) if rl is not None else math.inf,
        num_prompts=len(parts.task.prompts("train")) if parts.task is not None else 0,
        prompts_per_step=rl.prompts_per_step if rl is not None else 0,
        num_problems=min(test, rl.evaluate_problems) if rl and rl.evaluate_every else test,
        num_eval_problems=min(test, last.problems if last is not None else test),
        shared_prompts=bool(shared_prompts(recipe, parts.task)),
        steps_per_epoch=steps_per_epoch,
        keys=flat(to_dict(recipe)),
    )


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name.

    >>> flat({"rl": {"kl": {"coefficient": 0.1}, "steps": 3}})
    {'rl.kl.coefficient': 0.1, 'rl.steps': 3}
    """
    keys: dict[str, Any] = {}
    for name, value in table.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        keys |= {} if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys


def held_out(found: Mapping[str, Any], setup: Setup) -> dict[str, float]:
    """An evaluation of the stage eval as the metrics that one within rl logs."""
    problems = float(setup.num_eval_problems)
    metrics = {"eval/reward": found["reward"], "eval/problems": problems}
    accuracy = found["estimates"].get("accuracy")
    if accuracy is not None:
        metrics["eval/accuracy"] = accuracy["value"]
    return metrics | {f"eval/part/{name}": value for name, value in found["parts"].items()}


def verdict_metrics(verdict: Mapping[str, Any]) -> dict[str, float]:
    """What a reward model is worth, as metrics that rules read."""
    found = {"verdict/pairs": float(verdict["num_pairs"])}
    return found | {"verdict/length_correlation": float(verdict["length_correlation"])}


def judge_outcome(run: RunFolder, after: Mapping[str, Any], *, setup: Setup) -> None:
    """Compare the end of a run with its beginning; findings go to the folder of the stage eval."""
    rl, folder = run.stage("rl"), run.stage("eval")
    setup = dataclasses.replace(setup, stage="eval")
    before = (run.stage_record("rl") or {}).get("before")
    same = (before or {}).get("of") == after["of"]
    (folder.path / FILE_NAME).unlink(missing_ok=True)
    judge = Diagnosing(
        Several([]),
        folder.path,
        setup=setup,
        before=held_out(before, setup) if before is not None and same else None,
        known=[finding["finding"] for finding in rl.findings() if finding["until"] is None],
    )
    for record in rl.records():
        judge.recall(record)
    judge.finish(held_out(after, setup))


def _rounding(recipe: Resolved, device: str, *, supplied: bool) -> float:
    """How far the log-probs of engine and trainer may lie apart where nothing is wrong."""
    section = recipe.rl
    if section.top_k or section.top_p < 1:
        return math.inf  # the engine samples from less than the whole distribution, on purpose
    if section.max_lag:
        return math.inf  # the engine samples from older weights, on purpose
    name, _ = split(section.engine or "native", kind="engine")
    exact = choose_compute(recipe.model, device) is torch.float32
    known = name in SAME_PROCESS and not supplied
    return FLOAT32_ROUNDING if exact and known else OTHER_ROUNDING
