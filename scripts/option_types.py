"""Writes src/posttrain/options/: the options of the Python functions, typed, from the sections.

``python scripts/option_types.py`` writes them, ``--check`` says which are not as it would.
"""

from __future__ import annotations

import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from posttrain.config.data_stages import FromPreferences, Optimiser
from posttrain.config.describe import find_field, keys
from posttrain.config.fields import PIECE, Expected, Section
from posttrain.config.paths import _NAMED
from posttrain.config.sections import Recipe

FOLDER = Path(__file__).parents[1] / "src" / "posttrain" / "options"
HEAD = '''\
"""{title}

Written by ``python scripts/option_types.py`` from the sections of a recipe: change those, not this.
"""

from __future__ import annotations

{imports}


'''
# What has a parameter of its own in Python, and is no option.
PARAMETERS = {
    "run": ("folder", "seed", "stages"),
    "model": ("name",),
    "sft": ("data",),
    "": ("data",),  # of reward and dpo, in what they have in common
    "prefer": ("rewards",),
}
ROWS = ("test_data",)  # a file, or rows
PATHS = {name[-1] for name in _NAMED}
# Of the sections that several stages share: how each is called beside the stage's own options.
SHARED = {
    "run_options": "run",
    "model_options": "model",
    "adapter": "adapter",
    "cluster": "cluster",
    "grading": "grading",
    "environment": "environment",
    "teacher": "teacher",
    "sweep": "sweep",
}
EVERYWHERE = ("run_options", "model_options", "cluster")
LEARNING = (*EVERYWHERE, "adapter")  # what every function takes whose stage trains
BESIDE: dict[str, tuple[str, ...]] = {  # what each takes beside that, and its own section
    "sft": (),
    "prefer": (*EVERYWHERE, "grading"),
    "reward": (),
    "dpo": (),
    "rl": ("grading", "environment", "teacher", "sweep"),
    "eval": ("run_options", "model_options", "grading", "environment"),
}
SECTIONS = (
    "run", "model", "adapter", "cluster", "grading", "environment", "teacher",
    "rl.curriculum", "rl.kl", "rl.critic", "eval",
)  # fmt: skip
SUMMARIES = {
    Optimiser: "What every stage that trains has.",
    FromPreferences: "What every stage that learns from preferences has.",
}


def class_name(section: str) -> str:
    """``rl.kl`` is ``KlOptions``."""
    return f"{section.rpartition('.')[2].title()}Options"


def type_text(annotation: Any) -> str:  # noqa: PLR0911 - a row a kind
    """A type as Python writes it; what is a tuple in a recipe may be any sequence."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        named = [item for item in arguments[1:] if isinstance(item, Expected)]
        return "str | Mapping[str, Any]" if PIECE in named else type_text(arguments[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        parts = [type_text(part) for part in arguments]
        return " | ".join(dict.fromkeys(word for part in parts for word in part.split(" | ")))
    if origin is tuple and arguments[-1] is not ...:
        return "Sequence[float]"
    if origin is tuple:
        return f"Sequence[{type_text(arguments[0])}]"
    if origin is dict:
        return f"Mapping[str, {type_text(arguments[1])}]"
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return class_name(annotation.__name__.removeprefix("Written").removesuffix("Section"))
    return "Any" if annotation is Any else str(annotation.__name__)


def key_type(name: str, field: FieldInfo) -> str:
    """The type of a key; one that names a file takes a path."""
    if PIECE in field.metadata:
        return "str | Mapping[str, Any] | None"
    if name in ROWS:
        return "str | PathLike[str] | Iterable[Mapping[str, Any]] | None"
    if name == "kl":
        return 'KlOptions | float | Literal[False, "none", "loss", "reward"] | None'
    if name == "tasks":
        return "Sequence[Mapping[str, Any]]"
    text = type_text(field.annotation)
    return text.replace("str", "str | PathLike[str]", 1) if name in PATHS else text


def section_class(
    name: str, section: type[Section], *, title: str = "", base: str = "TypedDict"
) -> list[str]:
    """The class of one section: its keys, each with its line of help."""
    own = {key: field for key, field in keys(section).items() if key not in _inherited(section)}
    options = "(TypedDict, total=False)" if base == "TypedDict" else f"({base}, total=False)"
    lines = [f"class {name}{options}:", f'    """{title or (section.__doc__ or "").strip()}"""', ""]
    for key, field in own.items():
        if key in PARAMETERS.get(_section_name(section), ()):
            continue
        lines += _wrapped(f"    {key}: {key_type(key, field)}")
        lines += _help(field.description or "")
    return [*lines, "", ""]


def _section_name(section: type[Section]) -> str:
    fields = Recipe.model_fields
    return next((name for name, field in fields.items() if _is(field, section)), "")


def _is(field: FieldInfo, section: type[Section]) -> bool:
    return section in (field.annotation, *typing.get_args(field.annotation))


def _inherited(section: type[Section]) -> set[str]:
    """The keys that the class of a base has already."""
    return {key for base in section.__mro__[1:] if base in SUMMARIES for key in base.model_fields}


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _wrapped(line: str) -> list[str]:
    if len(line) <= 100:
        return [line]
    name, _, text = line.strip().partition(": ")
    inner = text.removeprefix("Literal[").removesuffix("]")
    return [f"    {name}: Literal[", f"        {inner}", "    ]"]


def _help(text: str) -> list[str]:
    if len(text) <= 89:
        return [f'    """{text}"""']
    first, *rest = textwrap.wrap(text, 92)
    return [f'    """{first}', *(f"    {line}" for line in rest), '    """']


def _section(name: str) -> type[Section]:
    _, field = find_field(name.split("."))
    assert field is not None, name
    parts = (field.annotation, *typing.get_args(field.annotation))
    return next(part for part in parts if isinstance(part, type) and issubclass(part, Section))


def shared_file() -> str:
    """The sections that several stages have, and the tables within ``[rl]``."""
    lines = [line for name in SECTIONS for line in section_class(class_name(name), _section(name))]
    return _file("The options of the sections that stages share: ``[run]``, ``[model]`` …", lines)


def stage_file() -> str:
    """The sections of the stages, each with those that it takes beside its own."""
    lines: list[str] = []
    for base, summary in SUMMARIES.items():
        above = "OptimiserOptions" if base is FromPreferences else "TypedDict"
        name = f"{base.__name__.removeprefix('From')}Options"
        made = section_class(name, base, title=summary, base=above)[:-2]
        lines += [*made, *(_beside(LEARNING) if base is Optimiser else ()), "", ""]
    for stage, beside in BESIDE.items():
        section = _section(stage)
        bases = [base for base in section.__mro__[1:] if base in SUMMARIES]
        above = f"{bases[0].__name__.removeprefix('From')}Options" if bases else "TypedDict"
        made = section_class(class_name(stage), section, base=above)[:-2]
        if stage == "eval":  # its section has a class of its own: rl takes it too
            made = ["class EvaluateOptions(EvalOptions, total=False):", made[1], ""]
        lines += [*made, *_beside(beside), "", ""]
    return _file("The options of ``posttrain.rl``, ``sft`` and the other stages.", lines)


def _beside(names: tuple[str, ...]) -> list[str]:
    """The options that are whole sections of a recipe."""
    lines: list[str] = []
    for called in names:
        kind = class_name(SHARED[called])
        kind = "Sequence[Mapping[str, Any]]" if called == "sweep" else kind
        kind = f"{kind} | int" if called == "adapter" else kind
        lines.append(f"    {called}: {kind}")
    return lines


def _file(title: str, lines: list[str]) -> str:
    text = "\n".join(lines).rstrip() + "\n"
    words = ("Iterable", "Mapping", "Sequence")
    abstract = [word for word in words if f"{word}[" in text]
    typed = [word for word in ("Any", "Literal", "TypedDict") if word in text]
    imports = [f"from collections.abc import {', '.join(abstract)}"]
    imports += ["from os import PathLike"] if "PathLike" in text else []
    imports += [f"from typing import {', '.join(typed)}"]
    defined = {line.split()[1].partition("(")[0] for line in lines if line.startswith("class ")}
    others = [class_name(name) for name in SECTIONS if class_name(name) not in defined]
    if used := sorted(name for name in others if name in text):
        inner = "".join(f"    {name},\n" for name in used)
        imports += ["", f"from posttrain.options.section_options import (\n{inner})"]
    return HEAD.format(title=title, imports="\n".join(imports)) + text


def files() -> dict[Path, str]:
    """Every file that is written, with its text."""
    return {
        FOLDER / "section_options.py": shared_file(),
        FOLDER / "stage_options.py": stage_file(),
    }


def main() -> int:
    """Write the files, or say which are not as they would be written."""
    check, stale = "--check" in sys.argv, 0
    for path, text in files().items():
        if check and path.read_text(encoding="utf-8") != text:
            print(f"{path}: is not what the sections say; run python scripts/option_types.py")
            stale += 1
        elif not check:
            path.write_text(text, encoding="utf-8")
    return min(stale, 1)


if __name__ == "__main__":
    sys.exit(main())
