"""The options of the Python functions: checked before any data is read, and told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from posttrain.config import recipe_from_dict
from posttrain.config.defaults import algorithm_row
from posttrain.registry import nearest, options

# Options that are sections of their own, not keys of the stage's.
SECTIONS = {"run_options": "run", "model_options": "model"} | {
    name: name for name in ("adapter", "cluster", "grading", "environment", "teacher", "sweep")
}
_WEIGHTED = "reward={function: weight}"


def check_options(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise for options that are unknown or wrong, by the names of the function's parameters.

    >>> from posttrain.api import rl
    >>> check_options(rl, {"resume_from_checkpoint": True})
    Traceback (most recent call last):
    ValueError: resume_from_checkpoint: posttrain.rl calls it resume; write resume=True
    """
    stage = function.__name__
    (kind,) = get_args(get_type_hints(function)["options"])  # of Unpack[RlOptions]
    known, parameters = get_type_hints(kind), {*options(function)}
    asks = "prompts" in parameters
    other = {
        "rewards": _WEIGHTED,
        "reward_weights": _WEIGHTED,
        "reward_funcs": "reward",
        "train_dataset": "prompts" if asks else "data",
        "eval_dataset": "test_prompts" if asks else "test_data",
        "output_dir": "folder",
        "processing_class": "tokenizer",
        "environment_factory": "env",
        "resume_from_checkpoint": "resume=True",
    }
    unknown = [name for name in given if name not in known]
    names = parameters | {*known} & {*SECTIONS, "test_data"}
    for name in unknown:
        said = other.get(name) or nearest(name, names, cutoff=0.8)
        meant, _, value = said.partition("=")
        if meant in names:
            raise ValueError(
                f"{name}: posttrain.{stage} calls it {meant}; write {meant}={value or '...'}"
            )
        for option in known.keys() & SECTIONS.keys():
            if name in getattr(known[option], "__annotations__", ()):
                raise ValueError(f'{name}: a key of {option}; write {option}={{"{name}": …}}')
    own, sections = split_sections(given)
    own.pop("test_data", None)  # rows in memory are no value of a recipe, and are read later
    own |= dict.fromkeys(unknown, False)  # also where they are None, which is left out
    recipe = recipe_from_dict({**sections, "eval" if stage == "evaluate" else stage: own})
    if recipe.rl is not None:
        algorithm_row(recipe.rl)


def split_sections(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a stage's own section, and those that are other sections, by their names."""
    own = {name: value for name, value in options.items() if name not in SECTIONS}
    if "kl" in own and own["kl"] is None:  # None of a recipe would be the algorithm's
        own["kl"] = False
    given = {name: options[name] for name in SECTIONS if options.get(name) is not None}
    for name, value in given.items():
        if name == "adapter" and isinstance(value, int):
            continue  # its rank; true: the usual one
        if not isinstance(value, Mapping) and name != "sweep":
            hint = "; an environment itself is env=…" * (name == "environment")
            raise ValueError(
                f"{name}: expected a mapping of the keys of [{SECTIONS[name]}], got {value!r}; "
                f"docs/configuration.md lists them{hint}"
            )
    return own, {SECTIONS[name]: value for name, value in given.items()}
