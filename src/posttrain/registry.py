"""Names to callables: ``"clipped"`` or ``{"name": "clipped", "clip_low": 0.1}``.

A table is an explicit dict of functions. The keyword-only parameters of a function are its
options: the signature is the schema, so an unknown option or one of the wrong type is an error
here, in the first second. ``"package.module:attribute"`` names a function outside the tables.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Spec = str | Mapping[str, Any]
Function = Callable[..., Any]
FILES = 10  # file names of a folder that an error lists at most


def did_you_mean(name: str, known: Iterable[str], *, most: int | None = None) -> str:
    """The end of an error about an unknown name: the nearest known one, and ``most`` of them all.

    >>> did_you_mean("grop", ["grpo", "ppo"])
    "did you mean 'grpo'? Known: grpo, ppo"
    >>> did_you_mean("grop", ["grpo", "ppo", "dapo"], most=1)
    "did you mean 'grpo'? Known: grpo and 2 more"
    """
    names = sorted(known)
    near = nearest(name, names, cutoff=0.5)
    hint = f"did you mean {near!r}? " if near else ""
    listed, more = names, ""
    if most is not None and len(names) > most:
        listed = difflib.get_close_matches(name, names, n=most, cutoff=0.0)
        more = f" and {len(names) - most:,} more"
    known_are = "Known" if hint else "known"
    return f"{hint}{known_are}: {', '.join(listed) if names else 'none'}{more}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known name that is most like one, whatever the case; "" where none is like it.

    Letters that changed places are the likeliest slip.

    >>> nearest("GRPO", ["ppo", "grpo"]), nearest("gpro", ["gspo", "grpo", "ppo"])
    ('grpo', 'grpo')
    """
    folded = {candidate.casefold(): candidate for candidate in known}
    swapped = [text for text in folded if sorted(text) == sorted(name.casefold())]
    near = swapped or difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else ""


def near_path(path: Path) -> Path | None:
    """A path that is there and spelled much like one that is not, part by part; None without one.

    >>> near_path(Path("no such folder at all"))
    """
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if (found / part).exists():
            found = found / part
            continue
        try:
            beside = [child.name for child in found.iterdir()]
        except OSError:
            return None
        near = difflib.get_close_matches(part, beside, n=1)
        if not near:
            return None
        found = found / near[0]
    return found if found != path else None


def look_up(name: str, table: Mapping[str, Function], *, kind: str) -> Function:
    """The function ``name`` of ``table``, or the attribute that ``"module:attribute"`` names.

    >>> look_up("absolute", {"absolute": abs}, kind="function")(-2)
    2
    """
    if name in table:
        return table[name]
    if ":" in name:
        return _import(name, kind)
    raise ValueError(f"{kind}: unknown name {name!r}; {did_you_mean(name, table)}")


def resolve(spec: Spec, table: Mapping[str, Function], *, kind: str) -> Function:
    """The function a spec names, with its options bound and checked.

    >>> def scale(x, *, factor: float = 2.0): return x * factor
    >>> resolve({"name": "scale", "factor": 3}, {"scale": scale}, kind="function")(5)
    15
    >>> resolve({"name": "scale", "facto": 3}, {"scale": scale}, kind="function")
    Traceback (most recent call last):
    ...
    ValueError: function 'scale': unknown option 'facto'; did you mean 'factor'? Known: factor
    """
    name, given = split(spec, kind=kind)
    function = look_up(name, table, kind=kind)
    check_options(function, given, kind=f"{kind} {name!r}")
    return functools.partial(function, **given) if given else function


def split(spec: Spec, *, kind: str) -> tuple[str, dict[str, Any]]:
    """A spec as its name and its options.

    >>> split({"name": "gae", "discount": 0.9}, kind="advantage")
    ('gae', {'discount': 0.9})
    """
    if isinstance(spec, str):
        return spec, {}
    given = dict(spec) if isinstance(spec, Mapping) else {}
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"{kind}: expected a name or a table with a 'name', got {spec!r}")
    return name, given


def options(function: Function) -> dict[str, inspect.Parameter]:
    """The options of a function: its keyword-only parameters, with types made real.

    >>> def scale(x, *, factor: float = 2.0): return x * factor
    >>> [(name, option.default) for name, option in options(scale).items()]
    [('factor', 2.0)]
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation imported only under TYPE_CHECKING
        signature = inspect.signature(function)
    return {
        name: option
        for name, option in signature.parameters.items()
        if option.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check_options(function: Function, given: Mapping[str, Any], *, kind: str) -> None:
    """Raise a ``ValueError`` for an unknown, missing or wrongly typed option."""
    known = options(function)
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{kind}: unknown option {name!r}; {did_you_mean(name, known)}")
        if not _fits(value, known[name].annotation):
            expected, hint = _expected(value, known[name].annotation)
            raise ValueError(f"{kind}: option {name!r} must be {expected}, got {value!r}{hint}")
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in given:
            raise ValueError(f"{kind}: option {name!r} is required")


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What nested tables hold, by dotted name; one that is empty stands for itself.

    >>> dotted({"rl": {"kl": {"coefficient": 0.1}, "steps": 3}})
    {'rl.kl.coefficient': 0.1, 'rl.steps': 3}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, Mapping) and value
        found |= dotted(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def _expected(value: Any, annotation: Any) -> tuple[str, str]:
    """What an option may be, in words, and which of its choices a value was meant to be."""
    if typing.get_origin(annotation) is not typing.Literal:
        return inspect.formatannotation(annotation), ""
    choices = [str(choice) for choice in typing.get_args(annotation)]
    near = nearest(str(value), choices)
    return f"one of {', '.join(choices)}", f"; did you mean {near}?" if near else ""


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a plain value may stand for ``annotation``; types it cannot judge are let through."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(annotation))
    if not isinstance(annotation, type) or annotation in (inspect.Parameter.empty, Any):
        return annotation is not None or value is None
    if isinstance(value, bool):  # isinstance(True, int) holds, but no user means a number by it
        return annotation in (bool, object)
    try:
        return isinstance(value, (int, float) if annotation is float else annotation)
    except TypeError:  # isinstance does not take a protocol or a typed dict
        return True


def _import(path: str, kind: str) -> Function:
    module_name, _, attribute = path.partition(":")
    module = None
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, attribute)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        lacks = (isinstance(error, ModuleNotFoundError) and error.name) or module_name
        if not f"{module_name}.".startswith(f"{lacks}."):  # an import inside of it
            raise ValueError(
                f"{kind}: cannot import {path!r}: {module_name} imports {lacks}, which is not "
                f"installed ({error}); install it, or move {attribute} into a file of its own"
            ) from error
        if module is None:
            near = nearest(module_name, [file.stem for file in Path().glob("*.py")])
            meant = f"{near}:{attribute}" if near not in ("", module_name) else ""
        else:
            near = nearest(attribute, [each for each in vars(module) if each[0] != "_"])
            meant = f"{module_name}:{near}" if near else ""
        hint = f"did you mean {meant!r}? Expected" if meant else "expected"
        raise ValueError(
            f"{kind}: cannot import {path!r} ({error}); {hint} 'package.module:function', "
            "importable from the current folder, or from the recipe's"
        ) from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place: Any = error if isinstance(error, SyntaxError) else last
        told = f"{type(error).__name__}: {error}; fix line {place.lineno} of {place.filename}"
        raise ValueError(f"{kind}: cannot import {path!r}: {told}") from error
    if not callable(function):
        raise ValueError(f"{kind}: {path!r} is a {type(function).__name__}, not a function")
    return typing.cast(Function, function)
