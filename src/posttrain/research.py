"""The parts of a run, for a training loop of your own.

The loop is yours, and the parts are those of ``posttrain.rl``: a :class:`posttrain.Policy` and its
``engine`` sample, :func:`collect_scored` scores, :func:`collate` makes the batch, a function of
:mod:`posttrain.algorithms` or your own adds ``advantages`` and ``weights``, and the learner steps
on ``Σ weights · loss``. :func:`make_plan` and :func:`train` are the loop of ``posttrain.rl``, for
who changes one piece of it; :mod:`posttrain.protocols` says what an engine or a learner must do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from posttrain.build import algorithm, learners
from posttrain.build.setup import choose_device
from posttrain.config import Resolved, recipe_from_dict, resolve
from posttrain.data.collate import collate
from posttrain.fast.score import replicas_for
from posttrain.pipelines.plan import Plan, State, make_objective
from posttrain.pipelines.rl import Step, advance, optimise, prepare, train
from posttrain.protocols import Engine, Learner, Objective, Outputs, Scorer, StepResult
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.collect import RolloutSource, collect_scored
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.stages.loaded.loaded_policy import LoadedPolicy
from posttrain.types import Collected

__all__ = [
    "Collected",
    "Engine",
    "Learner",
    "Objective",
    "Outputs",
    "Plan",
    "PromptCycle",
    "RewardScorer",
    "RolloutSource",
    "Scorer",
    "State",
    "Step",
    "StepResult",
    "advance",
    "collate",
    "collect_scored",
    "make_learner",
    "make_objective",
    "make_plan",
    "optimise",
    "prepare",
    "train",
]


def make_learner(policy: LoadedPolicy, **options: Any) -> Learner:
    """What trains the policy's own weights: AdamW, its schedule, micro-batches that fit.

    The options are those of ``[rl]``, with the same defaults and rules: ``learning_rate``,
    ``steps`` (how long the schedule is), ``weight_decay``, ``max_gradient_norm``, ``temperature`` …
    A reference, a critic or a teacher is kept where ``algorithm`` or ``kl`` asks for one.
    """
    recipe = _resolved(policy, options)
    section = recipe.rl
    return learners.make_learner(
        recipe,
        policy.policy,
        section=section,
        device=choose_device(recipe),
        total_steps=section.steps * section.epochs * section.minibatches,
        replicas=replicas_for(policy.policy.model, torch.get_num_threads()),
    )


def make_plan(policy: LoadedPolicy, *, recorded_tokens: int = 0, **options: Any) -> Plan:
    """An algorithm of the table with the options of ``[rl]``, as functions that may be replaced.

    ``dataclasses.replace(plan, advantage=mine)`` is the same algorithm with an advantage of yours.
    """
    section = _resolved(policy, options).rl
    return replace(algorithm.make_plan(section), recorded_tokens=recorded_tokens)


def _resolved(policy: LoadedPolicy, options: dict[str, Any]) -> Resolved:
    plain = {} if {"algorithm", "kl"} & options.keys() else {"kl": {"placement": "none"}}
    known = policy.recipe.model_dump(exclude_unset=True)
    sections = {name: known[name] for name in ("model", "adapter", "teacher") if known.get(name)}
    run = {**known.get("run", {}), "stages": ["rl"]}
    given = {**sections, "run": run, "rl": {**plain, **options}}
    return resolve(recipe_from_dict(given), supplied=["task", "rewards"])
