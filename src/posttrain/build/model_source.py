"""What ``eval`` and ``generate`` are given: a recipe, a run, a model inside a run, or a model.

Relative paths and modules of a run's recipe are found where the run was started.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build.fingerprint import fingerprints, module_folders
from posttrain.build.several.sweep import FOLDER
from posttrain.config import Recipe, Resolved, recipe_from_dict, to_dict
from posttrain.config.paths import import_from, model_paths, own_modules, relative_paths
from posttrain.config.read import read_values
from posttrain.config.specs import MODEL_REWARD, OWN_STAGE, of_any_model
from posttrain.models import save
from posttrain.models.files.model_objects import model_object
from posttrain.runs import RunFolder, write_json
from posttrain.runs.drift import compared_otherwise
from posttrain.runs.files import read_record
from posttrain.runs.finished import check_model, run_of
from posttrain.runs.resume import BESIDE_RECIPE, in_memory
from posttrain.track.progress import phase, showing

_OF_AN_EVALUATION = ("run", "model", "task", "rewards", "grading", "environment", "rl", "eval")
KEPT = "Prompts of a file and functions of a module need no such call: they are kept by name"
_OF_RL = ("engine", "max_new_tokens", "stop")  # what an evaluation takes from [rl]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The settings to evaluate or to answer with, as a recipe has them, and whose they are.

    ``run`` is the run they come from, ``supplied`` are parts of it that were Python objects, which
    no folder can hold; ``file`` is the recipe they come from.
    """

    values: dict[str, Any]
    run: Path | None = None
    supplied: tuple[str, ...] = ()
    file: str = ""
    told: tuple[str, ...] = ()

    @property
    def env(self) -> Any:
        """The environment that its task names, if any."""
        known = self.values.get("task")
        return known.get("env") if isinstance(known, Mapping) else None

    def task(self, *, env: Any) -> dict[str, Any] | None:
        """Its task with another environment; None where it names no task."""
        known = self.values.get("task")
        own = {"name": known} if isinstance(known, str) else dict(known or {})
        return {**own, "env": env} if "name" in own else None

    def evaluation(
        self, *, task: Mapping[str, Any] | None = None, given: Collection[str] = ()
    ) -> dict[str, Any]:
        """The settings of an evaluation, on another ``task`` if there is one.

        Rewards that were chosen for a task of the same name stay. ``given`` are parts that the
        caller brings: "task", "rewards".
        """
        lost = [part for part in ("task", "rewards") if part in self.supplied]
        missing = [part for part in lost if part not in given and not (part == "task" and task)]
        if missing:
            ways = {
                "task": ("prompts=…", "--task NAME"),
                "rewards": ("reward=…", "--rewards.NAME 1"),
            }
            again, named = (" ".join(ways[part][place] for part in missing) for place in (0, 1))
            raise ValueError(
                f"{self.run}: {_lost(missing)}; evaluate it from Python, posttrain.evaluate"
                f"({str(self.run)!r}, {again.replace(' ', ', ')}), or by others: {named}. {KEPT}"
            )
        values = dict(self.values)
        known = values.get("task")
        if task is not None:
            values["task"] = dict(task)
            name = known.get("name") if isinstance(known, Mapping) else known
            if name not in (None, task.get("name")):
                values.pop("rewards", None)
        return over(values, run={"stages": ["eval"]}, eval={})

    def changes(self, *, given: Collection[str] = ()) -> list[str]:
        """What of a run's data and rewards is not what it was, and so not evaluated as it was.

        Parts that are ``given`` anew do not count.
        """
        if self.run is None or not (self.run / "config.json").exists():
            return []
        config = RunFolder(self.run).config
        then = config.get("contents", {})
        used = [name for name in ("task", "rewards") if name not in given]
        named: dict[str, Any] = {name: self.values[name] for name in used if name in self.values}
        now = fingerprints(self.recipe(named)).get("contents", {})
        changed = [key for key in now if then.get(key, now[key]) != now[key]]
        whole = {key: compared_otherwise(config, f"contents.{key}") for key in changed}
        return [f"{key}: has changed since {self.run} used it{whole[key]}" for key in changed]

    def recipe(self, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
        """Settings as a checked recipe."""
        name = Path(self.file).stem or "recipe"
        return recipe_from_dict(values, overrides=overrides, name=name, source=self.file)


def over(values: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with keys of sections put over them; None leaves a key as it is.

    >>> over({"run": {"seed": 1}}, run={"seed": None, "stages": ["eval"]}, eval={})
    {'run': {'seed': 1, 'stages': ['eval']}, 'eval': {}}
    """
    changed = dict(values)
    for name, keys in sections.items():
        known = changed.get(name, {})
        if isinstance(known, Mapping):  # what is no table is refused where recipes are checked
            given = {key: value for key, value in keys.items() if value is not None}
            changed[name] = {**known, **given}
    return changed


def find_source(given: object) -> Source:
    """The settings behind a name: a recipe's, a run's with its trained policy, or a bare model."""
    name = model_name(given)
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        values, told = read_values(path)
        return Source(values=values, file=str(path), told=tuple(told))
    run = run_of(path)
    if run is None:
        return Source(values={"model": {"name": name}})
    folder = RunFolder(run)
    model = policy_of(folder) if path.resolve() == run.resolve() else path
    return _of_run(folder, str(model))


def trained_model(model: object) -> str:
    """A model as a name; of a run, by its object or folder, the policy that it has trained."""
    name = model_name(model)
    run = Path(name).expanduser()
    return str(policy_of(RunFolder(run))) if (run / "run.json").is_file() else name


def finished(folder: str) -> bool:
    """Whether a folder holds a finished run that has trained a policy."""
    if not (Path(folder) / "run.json").is_file():
        return False
    run = RunFolder(folder)
    return run.finished and run.model not in (None, run.stage("reward").model)


def model_name(model: object) -> str:
    """A model as a name; a ``ValueError`` for an object, which would be taken for a strange one."""
    return _as_text(
        model,
        'model: expected "tiny", a model or run folder, a .gguf file, a hub id or a '
        "PreTrainedModel of transformers, got {}; write a model to a folder, "
        "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER), and give that; "
        "merge adapters of peft before",
    )


def folder_name(folder: object, *, example: str) -> str:
    """A run folder as text; a ``ValueError`` for None and other objects."""
    return _as_text(
        folder,
        "folder: expected the path of a folder, got {}; a run keeps its model and its numbers "
        f"there: folder={example!r}, say, or leave it out",
    )


def _as_text(value: object, otherwise: str) -> str:
    if isinstance(value, str | os.PathLike) and str(value):
        return os.fspath(value)
    raise ValueError(otherwise.format(_what(value)))


def _what(value: object) -> str:
    if value is None or isinstance(value, str):
        return repr(value)
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"an object of type {module}{kind.__qualname__}"


def check_models(recipe: Resolved) -> None:
    """Verify what a recipe takes from run folders: its model, a backbone, reward models."""
    for path in dict.fromkeys(model_paths(recipe).values()):
        check_model(path)


def recorded_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder, with every default it was resolved to."""
    folder = RunFolder(path)
    config = config_of(folder)
    if lost := in_memory(config):
        raise ValueError(
            f"{folder.path}: {_lost(lost)}; to go on, make the same call again from Python, with "
            f"resume=True. {KEPT}"
        )
    given = {name: table for name, table in config.items() if name not in BESIDE_RECIPE}
    given["run"] = {**given["run"], "folder": str(folder.path)}
    return recipe_from_dict(given, overrides=overrides)


def _lost(parts: Sequence[str]) -> str:
    named = ", ".join(parts)
    return f"was started from Python with rows, functions or objects ({named}) that no folder holds"


def config_of(folder: RunFolder) -> dict[str, Any]:
    """The config of a run, with what every run has."""
    config = folder.config
    read_record(folder.path / "config.json", "run", "model")
    return config


def policy_of(folder: RunFolder) -> Path:
    """The policy of the last finished stage that trained one."""
    model = folder.model
    if model is None and (folder.path / FOLDER).is_dir():
        raise ValueError(
            f"{folder.path}: holds several adapters; name one of them, {folder.path / FOLDER}/0"
        )
    if model is None or model == folder.stage("reward").model:
        why = f"{folder.path}: no stage of this run has finished a policy"
        if folder.finished:
            raise ValueError(f"{why}: its stages are {', '.join(folder.stages)}; name another run")
        raise ValueError(
            f"{why}; go on with it (posttrain resume), or name one of its checkpoints: "
            "RUN/rl/checkpoints/step-…/model"
        )
    return model


def _of_run(folder: RunFolder, model: str) -> Source:
    """As the run evaluates: its task, rewards, limits, template and seed, and this model of it."""
    if not (folder.path / "config.json").exists():
        return Source(values={"model": {"name": model}})
    config = {k: v for k, v in config_of(folder).items() if k not in BESIDE_RECIPE}
    values = {name: config[name] for name in _OF_AN_EVALUATION if name in config}
    as_recorded(values, folder)
    options = of_any_model(values["model"]["options"])
    values["model"] = {**values["model"], "name": model, "options": options}
    values["run"] = {"seed": values["run"]["seed"]}
    if "rl" in values:
        values["rl"] = {key: values["rl"][key] for key in _OF_RL if key in values["rl"]}
    if values.get("eval", {}).get("temperature") == 1.0:
        del values["eval"]["temperature"]  # filled in beside samples, and only beside them
    scored = values.get("rewards", {}).get(MODEL_REWARD)
    if scored is not None and scored.get("path", OWN_STAGE) == OWN_STAGE:
        scored["path"] = str(folder.stage("reward").model)
    supplied = tuple(folder.config.get("supplied", {}))
    return Source(values=values, run=folder.path, supplied=supplied)


@showing()
def merge_adapter(source: str, folder: str | Path) -> None:
    """Write the adapter of a model folder, or of a run, added to its base, as an ordinary model."""
    source = _checked_policy(source)
    with phase(f"merging {source} into {folder}"):
        save.merge_folder(source, folder)


def _checked_policy(source: str) -> str:
    source = trained_model(source)
    check_model(source)
    return source


@showing()
def export_gguf(source: str, file: str | Path, *, kind: str = "f16") -> None:
    """Write the model of a folder or a run as a GGUF file."""
    source = _checked_policy(source)
    with phase(f"exporting {source} to {file}"):
        save.export_gguf(source, file, kind=kind)


@showing()
def import_gguf(file: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Turn a GGUF file into an ordinary folder, its weights dequantised to ``dtype``."""
    with phase(f"importing {file} into {folder}"):
        save.import_gguf(file, folder, dtype=dtype)


@contextlib.contextmanager
def named_model(model: object, tokenizer: object) -> Iterator[str]:
    """A name for a model; an object is in a folder of its own meanwhile."""
    handed = model_object(model, tokenizer)
    if handed is None:
        yield model_name(model)
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        handed.save(Path(folder) / "model")
        yield str(Path(folder) / "model")


@contextlib.contextmanager
def opened_source(model: object, tokenizer: object = None) -> Iterator[Source]:
    """What a model is loaded from, inside the block."""
    if isinstance(model, Source):
        yield model
        return
    with named_model(model, tokenizer) as name:
        yield find_source(name)


PLACES = "places.json"


def note_places(folder: RunFolder, recipe: Recipe) -> None:
    """Write down the current folder, and those of the recipe's own modules."""
    beside = [str(Path(recipe.source).resolve().parent)] if recipe.source else []
    found = [*beside, *module_folders(own_modules(to_dict(recipe)))] or _known(folder)[1]
    write_json(
        folder.path / PLACES, {"folder": str(Path.cwd()), "modules": list(dict.fromkeys(found))}
    )


def go_back(folder: RunFolder) -> str:
    """Go to the folder where a run was started, and say so; empty where that is here.

    What its recipe names is then the same to the letter, digests and all.
    """
    here = Path.cwd()
    started, beside = _known(folder)
    if not started or Path(started).resolve() == here.resolve():
        import_from(*map(Path, beside))
        return ""
    if not Path(started).is_dir():
        return f"was started in {started}, which is not here: its files are looked for in {here}"
    os.chdir(started)
    import_from(Path(started), *map(Path, beside), before=here)
    return f"goes on in {started}, where it was started"


def as_recorded(values: dict[str, Any], folder: RunFolder) -> None:
    """Let relative paths of a run's config mean what they meant to the run, seen from anywhere."""
    started, beside = _known(folder)
    import_from(*(Path(place) for place in (started, *beside) if place), before=Path.cwd())
    for table, key, _ in relative_paths(values):
        if started and (Path(started) / table[key]).exists():
            table[key] = str(Path(started) / table[key])


def _known(folder: RunFolder) -> tuple[str, list[str]]:
    """Where a run was started and where its modules stood; empty where it does not say."""
    path = folder.path / PLACES
    known = read_record(path) if path.exists() else {}
    return str(known.get("folder", "")), [str(place) for place in known.get("modules", ())]
