"""From a TOML file, a dict and the command line to a checked :class:`Recipe`."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator, ValidationError

from posttrain.config.describe import ConfigError, elsewhere, explain, find_field, value_type
from posttrain.config.paths import beside_recipe
from posttrain.config.sections import Recipe
from posttrain.config.specs import of_any_model
from posttrain.config.toml import value_text
from posttrain.registry import FILES, did_you_mean

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_KEY_PART = re.compile(r'"([^"]+)"|[^".]+')
# Dots in package.module:function do not split the name.
_REWARD_PART = re.compile(r'"([^"]+)"|[^":]+:[^".]+|[^".]+')
_REWARDS = ("rewards.", "prefer.rewards.")
_LOOSE_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"\\([nrt])")
_UNCLEAR = re.compile(r"\\\\|\\[nrt][a-z]")  # \t and \n that may begin \text and \nabla
# TOML reads 2030-01-31 as a date, but it may be the name of a folder.
_NOT_IN_RECIPES = (datetime.date, datetime.time)


def read_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with ``--section.key value`` from the command line put over it.

    Everything that is wrong is reported together, in a :class:`ConfigError` (a ``ValueError``).
    Files and modules that it names are found as :mod:`posttrain.config.paths` says.
    """
    path = Path(path)
    values, notes = read_values(path)
    recipe = _checked(values, overrides, name=path.stem, source=str(path))
    recipe._notes = tuple(notes)
    return recipe


def read_values(path: Path, *, beside: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """The tables of a TOML file, unchecked, and notes about the files that they name.

    Relative paths are looked up in ``beside`` instead of the folder of the file.
    """
    values = _parse(_read_text(path), path)
    return values, beside_recipe(values, beside or path.parent)


def recipe_from_dict(
    values: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    name: str = "recipe",
    source: str = "",
) -> Recipe:
    """The recipe that a dict describes, with the checks and messages of a file; None is left out.

    ``name`` is what the run folder is called where the dict does not say; ``source`` is the file
    that it was read from, for messages.

    >>> recipe_from_dict({"rl": {"steps": 6}}, overrides=["--rl.steps", "8"], name="demo").rl.steps
    8
    """
    return _checked(plain(values), overrides, name=name, source=source)


def plain(value: Any) -> Any:
    """Dicts, lists and scalars as TOML has them: no None, paths as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _checked(
    values: dict[str, Any], overrides: Sequence[str], *, name: str, source: str = ""
) -> Recipe:
    changes = parse_overrides(overrides)
    file = _file_alone(values, name=name) if changes else None
    if ("model", "name") in changes:
        _without_sizes(values, name=changes["model", "name"])
    for path, value in changes.items():
        put_key(values, path, value=value)
    if isinstance(values.setdefault("run", {}), dict):
        values["run"].setdefault("folder", f"runs/{name}")
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        overridden = [".".join(path) for path in changes]
        problems = explain(error, overridden=overridden)
        raise ConfigError(problems, source=source) from None
    recipe._source = source
    recipe._overrides, recipe._file = tuple(".".join(path) for path in changes), file
    return recipe


def _without_sizes(values: dict[str, Any], *, name: Any) -> None:
    """Drop the options of a model in whose place another is named, but those of any model."""
    model = values.get("model")
    options = model.get("options") if isinstance(model, dict) else None
    if model and isinstance(options, dict) and name != model.get("name", "tiny"):
        model["options"] = of_any_model(options)


def _file_alone(values: dict[str, Any], *, name: str) -> Recipe | None:
    """The recipe without overrides of the command line; None where it is not valid without them."""
    try:
        return _checked(copy.deepcopy(values), (), name=name)
    except ConfigError:
        return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent
        names = [str(folder / item.name) for item in folder.glob("*.toml")]
        near = did_you_mean(str(path), names, most=FILES)
        hint = near if names else f"no .toml file in {folder} either"
        raise ConfigError([f"no such recipe; {hint}"], source=str(path)) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text ({error.reason} at byte {error.start}); a recipe is TOML"
        raise ConfigError([message], source=str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], source=str(path)) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        problem = "lists or tables in each other, too deep to read; write them flatter"
        raise ConfigError([problem], source=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.search(str(error))
        number = int(found[1]) if found and found[1] else len(text.splitlines())
        message = _PLACE.sub("", str(error))
        line = "".join(text.splitlines()[number - 1 : number]).strip()
        if "after a key" in message and ":" in line.partition("=")[0]:
            message += '; a key with a ":" is written in quotes, "module:function" = 1.0'
        problem = f"{message}, in: {line}" if line else message
        raise ConfigError([problem], source=f"{path}:{number}") from None


def parse_overrides(arguments: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """``["--rl.steps", "6", "--rl.kl.target=0.1"]`` as paths and values; the last one wins.

    >>> parse_overrides(["--rl.steps", "6", "--task.name=sort", "--rewards.a.b:c", "2"])
    {('rl', 'steps'): 6, ('task', 'name'): 'sort', ('rewards', 'a.b:c'): 2}
    """
    changes: dict[tuple[str, ...], Any] = {}
    problems: list[str] = []
    remaining = list(arguments)
    while remaining:
        option = remaining.pop(0)
        key, equals, text = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not all(key.split(".")):
            problems.append(f"{option!r}: not an option; write --section.key value (--rl.steps 6)")
            continue
        path = tuple(_split_key(key))
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                problems.append(f"--{key}: needs a value: --{key} {_example(path)}")
                continue
            text = remaining.pop(0)
        if len(path) == 1 and path[0] not in Recipe.model_fields:
            home = elsewhere(key) or did_you_mean(key, Recipe.model_fields)
            problems.append(f"--{key}: name its section, --section.key; {home}")
            continue
        changes.pop(path, None)
        try:
            changes[path] = parse_value(text, path)
        except ValueError as error:
            problems.append(f"--{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return changes


def _split_key(key: str) -> list[str]:
    section = next((name for name in _REWARDS if key.startswith(name)), "")
    part = _REWARD_PART if section else _KEY_PART
    names = part.finditer(key.removeprefix(section))
    return [*section.split(".")[:-1], *(found[1] or found[0] for found in names)]


def _example(path: tuple[str, ...]) -> str:
    _, field = find_field(path)
    return "true" if value_type(field) is bool else "VALUE"


def parse_value(text: str, path: tuple[str, ...] = ()) -> Any:
    """What a value on the command line means: TOML where it is TOML, else the text itself.

    Where the key takes text, a bare word or number is text. Where it takes a list, a text in quotes
    is its one item, and commas part a bare one, unless the items are free text.

    >>> parse_value("true"), parse_value("1e-6"), parse_value('["rl"]'), parse_value("cosine")
    (True, 1e-06, ['rl'], 'cosine')
    >>> parse_value("7", ("run", "folder")), parse_value("sft,rl", ("run", "stages"))
    ('7', ['sft', 'rl'])
    >>> parse_value('", "', ("rl", "stop")), parse_value("a, b", ("rl", "stop"))
    ([', '], ['a, b'])
    """
    _, field = find_field(path)
    annotation = value_type(field)
    value = _toml_value(text)
    if annotation is str and not isinstance(value, str):
        return text
    if typing.get_origin(annotation) is not tuple or isinstance(value, list):
        return value
    if isinstance(value, str) and value != text:  # a quoted text
        return [value]
    item = typing.get_args(annotation)[0]
    if str in (item, *typing.get_args(item)):
        return [_unescaped(text)]
    if isinstance(value, dict):
        return [value]
    return [item.strip() for item in text.split(",") if item.strip()]


def _unescaped(text: str) -> str:
    """An unquoted text with \\n and \\t replaced; raises where a backslash may be meant."""
    if _UNCLEAR.search(text):
        raise ValueError(
            f"{text} may mean a backslash, or an escape; write it in quotes, as TOML: '\"{text}\"' "
            f"reads its escapes, \"'{text}'\" keeps its backslashes"
        )
    return _ESCAPE.sub(lambda found: _ESCAPED[found[1]], text)


def _toml_value(text: str) -> Any:
    if _LOOSE_NUMBER.fullmatch(text):
        return float(text)
    if "#" in text and text[:1] not in ("'", '"', "[", "{"):
        return text  # TOML would read the text after # as a comment
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = parsed.pop("value")
    return text if parsed or isinstance(value, _NOT_IN_RECIPES) else value


def put_key(values: dict[str, Any], path: tuple[str, ...], *, value: Any) -> None:
    """Set a value in tables inside each other, which are made where there are none."""
    table = values
    for depth, part in enumerate(path[:-1], start=1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = table[part] = _written_out(inner, path[:depth], option=path)
        table = inner
    table[path[-1]] = value


def _written_out(short: Any, path: tuple[str, ...], *, option: tuple[str, ...]) -> dict[str, Any]:
    """The table that a short form stands for: a name, a weight, a rank, a coefficient."""
    if path[-2:-1] == ("rewards",):
        return {"weight": short}
    name, field = find_field(path)
    for item in field.metadata if field is not None and name == ".".join(path) else ():
        if isinstance(item, BeforeValidator):
            with contextlib.suppress(ValueError):
                short = item.func(short)  # type: ignore[call-arg]
    if isinstance(short, dict):
        return short
    problem = f"{'.'.join(path)} is {value_text(short)}, not a table"
    raise ConfigError([f"--{'.'.join(option)}: {problem}"])
