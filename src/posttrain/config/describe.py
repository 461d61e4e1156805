"""Texts about recipes: what a key takes, what is wrong with one, and which key was meant."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from posttrain.config.data_stages import PEER_LOSSES, Optimiser
from posttrain.config.fields import Expected, Section
from posttrain.config.peers.option_names import ours, whose, without
from posttrain.config.sections import Recipe, WrittenRl
from posttrain.config.toml import value_text
from posttrain.registry import did_you_mean, nearest, options
from posttrain.written import written_function, written_table

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class ConfigError(ValueError):
    """Everything that is wrong with a recipe, for the user to read; ``problems`` one by one."""

    def __init__(self, problems: Sequence[str], *, source: str = "") -> None:
        self.problems = tuple(problems)
        prefix = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(prefix + self.problems[0])
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            super().__init__(f"{prefix}{len(self.problems)} problems{lines}")


def collect(checks: Iterable[Callable[[], object]], *, source: str) -> None:
    """Run all checks and raise their problems together, so that a user sees them all at once."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.extend(error.problems)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), source=source)


def expected(field: FieldInfo) -> str:
    """What a field takes, in words.

    >>> from posttrain.config import RlSection
    >>> expected(RlSection.model_fields["learning_rate"])
    'a number above 0'
    >>> expected(RlSection.model_fields["schedule"])
    '"constant", "linear" or "cosine"'
    """
    named = next((item.text for item in field.metadata if isinstance(item, Expected)), "")
    limits = " and ".join(
        f"{words} {getattr(item, name):.10g}"
        for item in field.metadata
        for name, words in _LIMITS.items()
        if hasattr(item, name)
    )
    text = named or _type_text(field.annotation)
    if any(getattr(item, "min_length", None) for item in field.metadata):
        text += ", not empty"
    joint = " of " if limits.startswith("at") else " "
    return f"{text}{joint}{limits}" if limits else text


def _type_text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _listed([value_text(choice) for choice in arguments], "or")
    if origin is tuple:
        return f"a list of {_type_text(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        parts = [_type_text(part) for part in arguments if part is not types.NoneType]
        return _listed(parts, "or")
    return _PLAIN.get(annotation, "a table")


def value_type(field: FieldInfo | None) -> Any:
    """The type of a key, without None.

    >>> from posttrain.config.resolved import RlSection, WrittenRl
    >>> value_type(WrittenRl.model_fields["epochs"]), value_type(RlSection.model_fields["epochs"])
    (<class 'int'>, <class 'int'>)
    """
    annotation = field.annotation if field is not None else None
    parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
    optional = len(parts) == 1 and typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return parts[0] if optional else annotation


def _listed(words: Sequence[str], joint: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"


def tables(
    section: type[Section] = Recipe, prefix: str = ""
) -> Iterator[tuple[str, type[Section]]]:
    """Every table of a recipe with known keys, by its dotted name; the recipe itself is ``""``.

    >>> [name for name, _ in tables()]
    ['', 'run', 'model', 'adapter', 'grading', 'environment', 'cluster', 'sft', 'prefer',
    'reward', 'dpo', 'teacher', 'rl', 'rl.curriculum', 'rl.kl', 'rl.critic', 'eval']
    """
    yield prefix, section
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is not None:
            yield from tables(inner, f"{prefix}.{name}" if prefix else name)


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a table in the order to show them: its own, then those of the optimiser."""
    fields = section.model_fields
    shared = Optimiser.model_fields if issubclass(section, Optimiser) else {}
    return {name: fields[name] for name in sorted(fields, key=lambda name: name in shared)}


def _section_of(field: FieldInfo) -> type[Section] | None:
    parts = [field.annotation, *typing.get_args(field.annotation)]
    return next(
        (part for part in parts if isinstance(part, type) and issubclass(part, Section)), None
    )


def find_field(path: Sequence[str | int]) -> tuple[str, FieldInfo | None]:
    """The dotted name of the deepest key on a path that is known, and its field.

    >>> find_field(["rl", "kl", "coefficient"])[0], find_field(["model", "chat", "bool"])[0]
    ('rl.kl.coefficient', 'model.chat')
    """
    section: type[Section] | None = Recipe
    field, walked = None, []
    for part in path:
        if section is None or part not in section.model_fields:
            break
        field = section.model_fields[str(part)]
        section = _section_of(field)
        walked.append(str(part))
    return ".".join(walked), field


def elsewhere(key: str, *, besides: str = "") -> str:
    """Which sections have a key, or its name in posttrain: ``"steps is a key of [rl]"``.

    >>> elsewhere("coefficient"), elsewhere("rewards")
    ('coefficient is a key of [rl.kl] and [rl.critic]', '[rewards] is a section of its own')
    """
    if key in Recipe.model_fields:
        return f"[{key}] is a section of its own"
    if key in ("env", "accuracy"):  # of any task, whose other keys are its options
        return f"{key} is a key of [task]"
    homes = [
        f"[{name}]"
        for name, section in tables()
        if name not in ("", besides) and key in section.model_fields
    ]
    if homes:
        return f"{key} is a key of {_listed(homes, 'and')}"
    known: dict[str, type[Section]] = {"rl": WrittenRl}  # first: most names are of its keys
    known |= {name: section for name, section in tables() if name}
    for name, section in known.items():
        if here := ours(key, section.model_fields, sections=Recipe.model_fields):
            return _here(key, here, section=name)
    return without(key)


def _here(key: str, here: str, *, section: str) -> str:
    """What a key of another library is called in full, where that is known."""
    known = dict(tables())[section].model_fields
    full = [
        f"{section}.{name}" if section and name.partition(".")[0] in known else name
        for name in here.split(" and ")
    ]
    return f"{whose(key)} is {' and '.join(full)} here" if here else ""


def unknown_key(path: Sequence[str | int], given: Any = None) -> str:
    """What is wrong with a key that does not exist, and which one was meant.

    >>> unknown_key(["rl", "estimator"]), unknown_key(["rl", "stepz"])
    ('unknown key; estimator is a key of [rl.kl]', 'unknown key; did you mean steps?')
    >>> unknown_key(["rl", "num_generations"])
    "unknown key; TRL's num_generations is rl.group_size here"
    """
    *parents, key = (str(part) for part in path)
    name = ".".join(parents)
    known = dict(tables())[name].model_fields
    what = "unknown key" if parents or not isinstance(given, Mapping) else "unknown section"
    if name == "model" and key in options(written_function("posttrain.models.tiny", "build_tiny")):
        here = f'options = {{ {key} = … }}, or from Python {{"options": {{"{key}": …}}}}'
        return f"{what}; {key} is an option of the tiny model: {here}"
    if here := ours(key, known):
        return f"{what}; {_here(key, here, section=name)}"
    home = elsewhere(key, besides=name)
    near = nearest(key, known, cutoff=0.9 if home else 0.6)
    if name == "reward" and (":" in key or key in written_table("posttrain.rewards", "REWARDS")):
        return f"{what}; did you mean [rewards]?"
    if near:
        return f"{what}; did you mean {near if parents else f'[{near}]'}?"
    if home:
        return f"{what}; {home}"
    return f"{what}; {did_you_mean(key, known)}"


def explain(error: ValidationError, *, overridden: Collection[str] = ()) -> list[str]:
    """The errors of pydantic, one line for each key; keys of the command line as typed."""
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path, given = item["loc"], item["input"]
        key, field = find_field(path)
        if item["type"] == "extra_forbidden":
            key, message = ".".join(map(str, path)), unknown_key(path, given)
        elif item["type"] == "value_error":
            message = f"{item['ctx']['error']}, got {_short(given)}"
        else:
            words = expected(field) if field is not None else "a table"
            message = f"must be {words}, got {_short(given)}{_near(given, field)}"
        option = next((name for name in overridden if f"{name}.".startswith(f"{key}.")), None)
        problems.setdefault(f"--{option}" if option else key, message)
    return [f"{key}: {message}" for key, message in problems.items()]


def _near(given: Any, field: FieldInfo | None) -> str:
    annotation = value_type(field)
    parts = [annotation, *typing.get_args(annotation)]
    parts += [inner for part in parts[1:] for inner in typing.get_args(part)]
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    choices = [choice for part in literals for choice in typing.get_args(part)]
    if typing.get_origin(annotation) is tuple and given in choices:
        return f"; write {value_text([given])}"
    near = nearest(PEER_LOSSES.get(given, given), choices) if isinstance(given, str) else ""
    return f"; did you mean {value_text(near)}?" if near else ""


def _short(given: Any) -> str:
    try:
        text = value_text(given)
    except ValueError:  # a Python object that no TOML file could hold
        text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."
