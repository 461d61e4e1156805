"""From the parameters of the Python functions to a recipe, the objects beside it, and its run."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from posttrain.build.model_source import trained_model
from posttrain.build.rows import Rows, data_name, named_rewards
from posttrain.build.setup import Supplied
from posttrain.config import Recipe, recipe_from_dict
from posttrain.config.recipe_rules import NO_WEIGHT
from posttrain.config.specs import MODEL_REWARD
from posttrain.models.files.model_objects import ModelObject, model_object
from posttrain.pipelines.callbacks import Callback
from posttrain.protocols import Env, Reward, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.stages.results import Run
from posttrain.stages.run import run
from posttrain.stages.whole.given_options import split_sections
from posttrain.stages.whole.places import run_place


class TransformersModel(Protocol):
    """A ``PreTrainedModel`` of transformers, for who checks types."""

    config: Any

    def save_pretrained(self, save_directory: Any) -> Any:
        """Write it to a folder."""
        ...


Model = str | Path | Run | TransformersModel
Data = str | Path | Rows
Preferences = str | Path | Run | Rows
TaskLike = str | Mapping[str, Any] | Task
EnvLike = str | Mapping[str, Any] | Env | Callable[..., Any]
Rewards = str | Reward | Mapping[Any, Any] | Sequence[str | Reward]
OF_PARAMETERS = ("folder", "seed", "stages")
_PACKAGE = Path(__file__).parents[2]
_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_our_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cut our frames from the traceback of a mistake whose message says what to do.

    All of them, or none: a traceback with a frame of a user's function, or of a library, is whole,
    and so is that of an error that none of us has raised.
    """

    @functools.wraps(function)
    def called(*given: _P.args, **options: _P.kwargs) -> _T:
        try:
            return function(*given, **options)
        except (ValueError, RuntimeError, OSError) as error:
            frames = traceback.extract_tb(error.__traceback__)
            files = {Path(frame.filename) for frame in frames}
            ours = all(_PACKAGE in file.parents or "contextlib" in file.stem for file in files)
            if not ours or not (frames[-1].line or "").startswith("raise"):
                raise
            raise error.with_traceback(None) from error.__cause__

    return called


@dataclass(frozen=True)
class TrainingCall:
    """What every function that trains is given beside the options of its stage."""

    model: Model
    tokenizer: Any
    folder: str | Path | None
    seed: int
    resume: bool
    overwrite: bool
    allow_changes: Sequence[str]
    callbacks: Sequence[Callback] = ()

    def run(
        self,
        stages: Sequence[str],
        options: Mapping[str, Any],
        *,
        beside: Mapping[str, Any] | None = None,
        task: Task | Mapping[str, Any] | None = None,
        reward: Rewards | None = None,
        env: Any = None,
    ) -> Run:
        """Run the stages, the first of them with these options, in the folder that is meant."""
        handed = model_object(self.model, self.tokenizer)
        name = trained_model(self.model) if handed is None else ""
        own, sections = split_sections(options)
        test = own.get("test_data")
        if test is not None and not isinstance(test, str | Path):
            own["test_data"] = data_name(test, name="test_data")
        place = run_place(self.folder, stages[0], resume=self.resume, overwrite=self.overwrite)
        with place as folder:
            start = Path(folder) / f"start-{handed.digest}" if handed is not None else None
            model = {"name": name or str(start), **sections.get("model", {})}
            run_section = self._run_section(folder, stages, given=sections.get("run", {}))
            given = {
                **sections,
                "run": run_section,
                "model": model,
                stages[0]: own,
                **(beside or {}),
            }
            recipe, supplied = make_recipe(given, task, reward=reward, env=env)
            if self.callbacks:
                supplied["callbacks"] = _callables(self.callbacks)
            return run(
                recipe,
                supplied,
                resume=self.resume,
                overwrite=self.overwrite,
                allow_changes=self.allow_changes,
                start=None if handed is None or start is None else partial(_write, handed, start),
            )

    def _run_section(
        self, folder: str, stages: Sequence[str], *, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        if twice := sorted(given.keys() & {*OF_PARAMETERS}):
            raise ValueError(
                f"run_options: {', '.join(twice)} cannot be given here; folder and seed are "
                "parameters of their own, and each stage is a function"
            )
        return {"folder": folder, "seed": self.seed, "stages": list(stages), **given}


def _callables(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    if isinstance(callbacks, Sequence) and all(map(callable, callbacks)):
        return callbacks
    raise ValueError(
        f"callbacks: expected a list of functions of a finished step, got {callbacks!r}; "
        "callbacks=[my_function]"
    )


def _write(handed: ModelObject, start: Path) -> None:
    if not start.is_dir():
        handed.save(start)


def make_recipe(
    given: dict[str, Any],
    task: Task | Mapping[str, Any] | None,
    *,
    reward: Rewards | None = None,
    env: Any = None,
) -> tuple[Recipe, Supplied]:
    """A recipe, and beside it the parts that are objects; what has a name goes into the recipe.

    ``env`` is the spec of the environment of a task that is an object.
    """
    if isinstance(task, Mapping):
        given, task = {**given, "task": dict(task)}, None
    elif env is not None:
        if task is None and "sft" not in given:
            raise ValueError(
                "prompts: missing, and an environment brings none; give prompts=…, or a task"
            )
        given = {**given, "task": {"env": env}}
    table = named_rewards(_weights(reward))
    if all(isinstance(name, str) for name in table):
        given = given if reward is None else _with_rewards(given, table)
        return recipe_from_dict(given), _supplied(task=task)
    played = (given.get("task") or {}).get("env") is not None
    if "rl" in given and not any(table.values()) and not played:
        raise ValueError(f"reward: {NO_WEIGHT}")
    # A reward model is made with the policy; functions, and what has a name beside them, here.
    models = {name: spec for name, spec in table.items() if name == MODEL_REWARD}
    if models:
        given = _with_rewards(given, models)
    made = RewardScorer({name: spec for name, spec in table.items() if name != MODEL_REWARD})
    return recipe_from_dict(given), _supplied(task=task, rewards=made)


def _with_rewards(given: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with rewards by name: those of an annotator are in its own section."""
    if "prefer" in given:
        return {**given, "prefer": {**given["prefer"], "rewards": dict(table)}}
    return {**given, "rewards": dict(table)}


def _supplied(**given: Any) -> Supplied:
    parts: Any = {name: part for name, part in given.items() if part is not None}
    return Supplied(**parts)


def _weights(reward: Rewards | None) -> Mapping[Any, Any]:
    """The rewards with their weights; one alone, and each of a list, has 1."""
    if isinstance(reward, Mapping):
        return reward
    listed = [] if reward is None else reward if isinstance(reward, list | tuple) else [reward]
    if twice := [each for place, each in enumerate(listed) if each in listed[:place]]:
        raise ValueError(f"reward: {twice[0]!r} is listed twice; name each once")
    return dict.fromkeys(listed, 1.0)
