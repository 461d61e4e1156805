"""What a run depends on beyond its recipe's words: own functions and what they use, files.

The run folder remembers a digest of each, so that an edited reward or data file is another run.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.build.setup import Supplied
from posttrain.config import Recipe, Resolved, to_dict
from posttrain.config.paths import PIECES, WORDS
from posttrain.data.row_files import SUFFIXES
from posttrain.registry import look_up
from posttrain.runs import config_digest
from posttrain.runs.function_digest import function_digest

_FILES = ("data", "test_data", "backbone")
# Of a folder: weights, tokenizer and template of a model, or the rows of a data set.
_OF_FOLDERS = (".safetensors", ".jinja", ".txt", ".model", *SUFFIXES)
_KNOWN_FOLDERS = ("config.json", "adapter_config.json", "state.json", "*-of-*")
_WHOLE = 256 * 2**20  # bytes up to which a file is read in full


def run_config(recipe: Resolved, supplied: Supplied) -> dict[str, Any]:
    """What config.json of a run holds: the recipe, and digests of all else that it depends on."""
    config = {**to_dict(recipe), **supplied_digests(supplied), **fingerprints(recipe)}
    return config | {"code": code_version()}


def fingerprints(recipe: Recipe) -> dict[str, Any]:
    """Digests of the functions, files and model folders that a recipe names; empty without any."""
    tables = {"rewards": recipe.rewards}
    if isinstance(recipe, Resolved) and "prefer" in recipe.stages:
        tables["prefer.rewards"] = recipe.prefer.rewards
    named = {f"task.{key}": value for key, value in (recipe.task or {}).items()}
    functions = {"task": str((recipe.task or {}).get("name"))}
    for number, each in enumerate((recipe.task or {}).get("tasks", ()), start=1):
        named |= {f"task.tasks[{number}].{key}": value for key, value in each.items()}
        functions[f"task.tasks[{number}]"] = str(each.get("name"))
    named["model.name"] = recipe.model.name
    own = {key: (recipe.task or {}).get(key) for key in ("accuracy", "env")}
    functions |= {f"task.{key}": spec["name"] for key, spec in own.items() if spec is not None}
    for key, table in tables.items():
        functions |= {f"{key}.{name}": name for name in table}
        named |= {f"{key}.{name}.path": given.get("path") for name, given in table.items()}
    for stage in ("sft", "reward", "dpo"):
        if stage in recipe.stages:
            section = getattr(recipe, stage)
            named |= {f"{stage}.{key}": getattr(section, key, None) for key in _FILES}
    if isinstance(recipe, Resolved) and "rl" in recipe.stages:
        pieces = {f"rl.{piece}": getattr(recipe.rl, piece) for piece in PIECES}
        named["teacher.model"] = recipe.teacher and recipe.teacher.model
        if recipe.rl.critic is not None:
            named["rl.critic.source"] = recipe.rl.critic.source
            pieces["rl.critic.loss"] = recipe.rl.critic.loss
        functions |= {key: str(spec["name"]) for key, spec in pieces.items() if spec}
    found = [(key, _own_function(name)) for key, name in functions.items()]
    found += [(key, contents_digest(value)) for key, value in named.items()]
    known = {key: digest for key, digest in found if digest is not None}
    return {"contents": known} if known else {}


def _own_function(name: str) -> str | None:
    """The digest of a function that is named ``module:function``; None for one of ours."""
    if ":" not in name or name.startswith("reasoning_gym:"):
        return None
    return function_digest(look_up(name, {}, kind="task, reward or piece"))


def supplied_digests(given: Supplied) -> dict[str, Any]:
    """What the run folder remembers of objects, so that another reward is another run."""
    known: dict[str, Any] = {}
    if "task" in given:
        train, test = given["task"].prompts("train"), given["task"].prompts("test")
        known["task"] = {"train": len(train), "test": len(test)}
        known["task"]["prompts"] = config_digest(repr([*train, *test]))
    if "rewards" in given:
        known["rewards"] = {
            reward.name: {
                "weight": reward.weight,
                "function_and_what_it_uses": function_digest(reward.function),
            }
            for reward in given["rewards"].rewards
        }
    if "engine" in given:
        known["engine"] = type(given["engine"]).__name__
    if "callbacks" in given:  # what they hold may change while they work
        names = [getattr(one, "__qualname__", type(one).__name__) for one in given["callbacks"]]
        known["callbacks"] = names
    return {"supplied": known} if known else {}


def code_version() -> dict[str, str]:
    """What the numbers of a run come from beside its recipe: this code, and what computes."""
    package = Path(__file__).parents[1]
    texts = [(str(path.relative_to(package)), path) for path in package.rglob("*.py")]
    source = config_digest(*(f"{name} {_digest(path)}" for name, path in sorted(texts)))
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"posttrain": __version__, "source": source[:16], **versions}


def contents_digest(value: Any) -> str | None:
    """The digest of a file, a model or data folder; None for what is none, or means a stage."""
    if not isinstance(value, str) or value in WORDS:
        return None
    path = Path(value).expanduser()
    if path.is_file():
        return _digest(path)
    if not path.is_dir() or not any(any(path.glob(name)) for name in _KNOWN_FOLDERS):
        return None
    files = (file for file in path.iterdir() if file.suffix in _OF_FOLDERS and file.is_file())
    return config_digest(*(f"{file.name} {_digest(file)}" for file in sorted(files)))


def _digest(file: Path) -> str:
    """Of a file's bytes; of a large one's size, beginning and end: reading it all takes minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if size <= _WHOLE:
            digest.update(opened.read())
        else:
            digest.update(opened.read(_WHOLE // 2))
            opened.seek(-_WHOLE // 2, 2)
            digest.update(opened.read())
    return digest.hexdigest()
