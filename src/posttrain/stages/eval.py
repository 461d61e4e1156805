"""The stage ``eval``: what came out of a run against what it began with; or a model alone."""

from __future__ import annotations

import warnings
from typing import Any

from posttrain.build.model_source import check_models
from posttrain.build.rows import data_told
from posttrain.build.setup import Setup, Supplied, choose_device, make_policy, make_setup
from posttrain.build.trained_rows import check_has_test, check_unseen
from posttrain.check.texts import find_notes, read_rows
from posttrain.config import Recipe, resolve
from posttrain.models.cache import context_length
from posttrain.pipelines.evaluate import Evaluation
from posttrain.stages.diagnosis import judge_outcome, make_background
from posttrain.stages.evaluation import evaluate_into, evaluate_policy
from posttrain.stages.job import Job
from posttrain.tasks import make_task
from posttrain.track.progress import showing, teller

DEFAULT_TOKENS = 256


def run_eval(setup: Setup, job: Job) -> dict[str, Any]:
    """Evaluate what the stages before it have made of the policy."""
    with job.stage("eval", total_steps=0) as stage:
        found = evaluate_into(stage.folder.path / "problems.jsonl", setup)
        judge_outcome(job.folder, found, background=make_background(setup, stage="eval"))
        return {"after": found}


def tell_alone(recipe: Recipe) -> None:
    """Say of a recipe with ``[cluster]`` that this command does without it."""
    if recipe.cluster is not None and recipe.cluster.address is not None:
        warnings.warn(
            "cluster: this command samples in its own process; [cluster] is for run and resume",
            stacklevel=3,
        )


@showing()
def evaluate_recipe(
    recipe: Recipe, supplied: Supplied | None = None, *, chosen: bool = False
) -> Evaluation:
    """Run the ``[eval]`` section of a recipe on its model, without a run folder.

    Test problems that the model was trained on are refused, unless someone has ``chosen`` them.
    """
    supplied = supplied or Supplied()
    tell_alone(recipe)
    resolved = resolve(recipe, supplied=supplied)
    training = recipe.rl is not None and not recipe.rl.model_fields_set <= {"engine", "stop"}
    asked = training or (recipe.eval is not None and recipe.eval.max_new_tokens)
    task = supplied.get("task") or make_task(resolved.task or {})
    check_has_test(task, resolved.task)
    played = (resolved.task or {}).get("env") is not None
    check_unseen(task, resolved.model.name, chosen=chosen, played=played)
    check_models(resolved)
    device = choose_device(resolved)
    policy = make_policy(resolved, resolved.model.name, device=device)
    section, limit = resolved.eval, context_length(policy.model)
    if not asked and limit is not None:
        # Half of the context at most: the other half is for the question.
        section = section.model_copy(update={"max_new_tokens": min(DEFAULT_TOKENS, limit // 2)})
    setup = make_setup(resolved, policy, device=device, task=task, rewards=supplied.get("rewards"))
    for line in data_told(resolved, task):
        teller()(line)
    for note in find_notes(read_rows(resolved, task, stages=["eval"]), setup.template):
        warnings.warn(f"{note.text}; {note.fix}", stacklevel=2)
    try:
        return evaluate_policy(setup, section)
    finally:
        setup.close()
