"""The same from Python: ``posttrain.rl``, ``posttrain.sft``, ``posttrain.evaluate``.

Options are those of the recipe's section of the same name, checked by the same rules. A run that
was cut short goes on exactly where it was when it is called again with ``resume=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.build.parts import (
    choose_device,
    filled,
    make_engine,
    make_parts,
    make_policy,
    make_template,
)
from posttrain.build.results import Run
from posttrain.build.rows import Rows, has_test, rows_task
from posttrain.build.run import Supplied, run
from posttrain.build.stages import evaluate_policy
from posttrain.config import EvalSection, Recipe, recipe_from_dict, resolve
from posttrain.config.pieces import MODEL_REWARD
from posttrain.config.rules import NO_WEIGHT
from posttrain.models.cache import context_length
from posttrain.models.save import import_gguf
from posttrain.pipelines.evaluate import Evaluation
from posttrain.protocols import Reward, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.track.progress import showing
from posttrain.types import Completion, Prompt, Sampling

__all__ = [
    "evaluate",
    "evaluate_recipe",
    "generate",
    "import_gguf",
    "prefer",
    "reward",
    "rl",
    "sft",
]

DEFAULT_TOKENS = 256

Rewards = str | Reward | Mapping[Any, Any]


def rl(
    *,
    model: str | Path = "tiny",
    prompts: str | Path | Rows | None = None,
    reward: Rewards | None = None,
    task: str | Mapping[str, Any] | Task | None = None,
    test_prompts: str | Path | Rows = (),
    folder: str | Path = "runs/rl",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    evaluate: bool = True,
    model_options: Mapping[str, Any] | None = None,
    grading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Reinforcement learning: a model, prompts and a reward in; a run with a better model out.

    ``prompts`` are strings, or rows with a ``prompt`` and the columns that the reward wants, or a
    JSONL file of those; ``reward`` is a function, a name, or a table of either with weights. In
    their place ``task`` names a task, or is one. With test prompts the model is evaluated before
    and after. Rewards run in worker processes; ``grading={"workers": 0}`` runs them in this one,
    where they may change its variables. The other options are those of ``[rl]``:
    ``algorithm="grpo"``, ``steps=100`` …
    """
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts)
    stages = ["rl", "eval"] if evaluate and has_test(chosen) else ["rl"]
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": stages},
        "model": {"name": str(model), **(model_options or {})},
        "grading": dict(grading or {}),
        "rl": options,
    }
    return run(*_recipe(given, chosen, reward=reward), resume=resume, allow_changes=allow_changes)


def sft(
    *,
    model: str | Path = "tiny",
    data: str | Path = "task",
    task: str | Mapping[str, Any] | Task | None = None,
    folder: str | Path = "runs/sft",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Supervised fine-tuning on a JSONL file of demonstrations, or on a task's own answers.

    The other options are those of ``[sft]``: ``epochs=2``, ``learning_rate=1e-4`` …
    """
    chosen = rows_task(task, prompts=None, test_prompts=())
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": ["sft"]},
        "model": {"name": str(model), **(model_options or {})},
        "sft": {"data": str(data), **options},
    }
    return run(*_recipe(given, chosen), resume=resume, allow_changes=allow_changes)


def prefer(
    *,
    model: str | Path,
    task: str | Mapping[str, Any] | Task | None = None,
    prompts: str | Path | Rows | None = None,
    test_prompts: str | Path | Rows = (),
    reward: Rewards | None = None,
    folder: str | Path = "runs/prefer",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Preferences between completions of a model, by rewards: ``FOLDER/prefer/pairs.jsonl``.

    ``reward`` is what the annotator goes by: names with weights; without, the task's own rewards.
    The other options are those of ``[prefer]``: ``error_rate=0.1``, ``samples=4`` …
    """
    chosen = rows_task(task, prompts=prompts, test_prompts=test_prompts)
    table = _weights(reward)
    if not all(isinstance(name, str) for name in table):
        raise ValueError(
            'reward: give the annotator\'s rewards by name, "my_module:my_function" say'
        )
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": ["prefer"]},
        "model": {"name": str(model), **(model_options or {})},
        "prefer": {"rewards": dict(table), **options},
    }
    return run(*_recipe(given, chosen), resume=resume, allow_changes=allow_changes)


def reward(
    *,
    model: str | Path,
    data: str | Path,
    folder: str | Path = "runs/reward",
    seed: int = 0,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A reward model from a JSONL file of preferences: pairs, ranked sets or scored completions.

    The other options are those of ``[reward]``: ``epochs=2``, ``learning_rate=1e-5`` …
    """
    given = {
        "run": {"folder": str(folder), "seed": seed, "stages": ["reward"]},
        "model": {"name": str(model), **(model_options or {})},
        "reward": {"data": str(data), **options},
    }
    return run(recipe_from_dict(given), resume=resume, allow_changes=allow_changes)


def evaluate(
    model: str | Path,
    *,
    task: str | Mapping[str, Any] | Task | None = None,
    prompts: str | Path | Rows | None = None,
    reward: Rewards | None = None,
    seed: int = 0,
    model_options: Mapping[str, Any] | None = None,
    grading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Evaluation:
    """Accuracy of a model on a task's test problems, or on ``prompts`` under ``reward``.

    The other options are those of ``[eval]``: ``problems=200``, ``samples=8`` …
    """
    chosen = rows_task(task, prompts=None, test_prompts=prompts if prompts is not None else ())
    given = {
        "run": {"seed": seed, "stages": ["eval"], "folder": "runs/eval"},
        "model": {"name": str(model), **(model_options or {})},
        "grading": dict(grading or {}),
        "eval": options,
    }
    return evaluate_recipe(*_recipe(given, chosen, reward=reward))


@showing()
def evaluate_recipe(recipe: Recipe, supplied: Supplied | None = None) -> Evaluation:
    """Run the ``[eval]`` section of a recipe on its model, without a run folder."""
    supplied = supplied or Supplied()
    device = choose_device(recipe)
    policy = make_policy(recipe, recipe.model.name, device=device)
    limit = context_length(policy.model)
    section = recipe.eval or EvalSection()
    if section.max_new_tokens is None and limit is not None:
        # Half of the context at most: the other half is for the question.
        short = section.model_copy(update={"max_new_tokens": min(DEFAULT_TOKENS, limit // 2)})
        recipe = recipe.model_copy(update={"eval": short})
    recipe = resolve(recipe, supplied=supplied.names())
    parts = make_parts(recipe, policy, device=device, task=supplied.task, rewards=supplied.rewards)
    try:
        return evaluate_policy(recipe, policy, parts=parts, section=filled(recipe.eval))
    finally:
        parts.close()


@showing()
def generate(
    model: str | Path,
    prompt: str,
    *,
    num_samples: int = 1,
    seed: int = 0,
    chat: bool | str = "auto",
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[Completion]:
    """What a model answers to a prompt; greedy unless a temperature is given.

    Without ``max_new_tokens``, 256 or what the model's context leaves.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"prompt: expected one prompt as text, got {prompt!r}")
    recipe = recipe_from_dict({"model": {"name": str(model), "chat": chat}})
    device = choose_device(recipe)
    policy = make_policy(recipe, str(model), device=device)
    template = make_template(recipe, policy)
    engine = make_engine("native", policy, template=template)
    question = template.render(Prompt(id="prompt", text=prompt))
    limit = context_length(policy.model)
    room = DEFAULT_TOKENS if limit is None else max(1, limit - len(question.tokens))
    sampling = Sampling(
        max_new_tokens=min(DEFAULT_TOKENS, room) if max_new_tokens is None else max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return engine.generate([question], sampling, num_samples=num_samples, seed=seed)[0]


def _recipe(
    given: dict[str, Any],
    task: Task | Mapping[str, Any] | None,
    *,
    reward: Rewards | None = None,
) -> tuple[Recipe, Supplied]:
    """A recipe, and beside it the parts that are objects; what has a name goes into the recipe."""
    if isinstance(task, Mapping):
        given, task = {**given, "task": dict(task)}, None
    table = _weights(reward)
    if all(isinstance(name, str) for name in table):
        return recipe_from_dict({**given, "rewards": dict(table)}), Supplied(task=task)
    if MODEL_REWARD in table:
        raise ValueError(
            "reward: a reward model and functions together need names; give the functions as "
            '"my_module:my_function", importable from the current folder'
        )
    if "rl" in given and not any(table.values()):
        raise ValueError(f"reward: {NO_WEIGHT}")
    return recipe_from_dict(given), Supplied(task=task, rewards=RewardScorer(table))


def _weights(reward: Rewards | None) -> Mapping[Any, Any]:
    """The rewards with their weights; one alone has 1."""
    if isinstance(reward, Mapping):
        return reward
    if isinstance(reward, list | tuple | set):
        raise ValueError("reward: several rewards need weights; write {first: 1.0, second: 0.5}")
    return {} if reward is None else {reward: 1.0}
