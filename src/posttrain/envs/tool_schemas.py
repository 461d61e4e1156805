"""JSON schemas of functions, from type hints and docstrings, and arguments checked against them.

The schemas are those of ``transformers.utils.get_json_schema``, which chat templates expect.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.registry import did_you_mean

Schema = dict[str, Any]

_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(\[.*?\])\)\s*$", re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The schema of a function or method, as a tool: its name, its docstring, its parameters.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add numbers.
    ...
    ...     Args:
    ...         a: The first.
    ...         b: The second.
    ...     '''
    >>> tool_schema(add)["function"]["parameters"]["required"]
    ['a']
    """
    name = function.__name__
    main, described, returned = _documented(function)
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for each, parameter in inspect.signature(function).parameters.items():
        if each in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if each not in hints or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise ValueError(f"tool {name!r}: parameter {each!r} needs a name and a type hint")
        if each not in described:
            raise ValueError(
                f"tool {name!r}: its docstring does not describe {each!r}; add a line "
                f"'{each}: what it is' under 'Args:'"
            )
        if parameter.default is parameter.empty:
            required.append(each)
        properties[each] = _with_description(_of(hints[each], name), described[each])
    parameters: Schema = {"type": "object", "properties": properties}
    schema: Schema = {"name": name, "description": main, "parameters": parameters}
    if required:
        parameters["required"] = required
    if "return" in hints:
        schema["return"] = _of(hints["return"], name)
        if returned:
            schema["return"]["description"] = returned
    return {"type": "function", "function": schema}


def _documented(function: Callable[..., Any]) -> tuple[str, dict[str, str], str]:
    """The description of a function, of its arguments and of what it returns (Google's style)."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(
            f"tool {function.__name__!r}: it needs a docstring, which the model reads; what is no "
            "tool begins with an underscore"
        )
    main, *sections = _SECTION.split(text)
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    described: dict[str, str] = {}
    last = ""
    for line in filter(str.strip, found.get("Args", "").splitlines()):
        argument = _ARGUMENT.match(line)
        if argument:
            last = argument[1]
        written = argument[2] if argument else f"{described.get(last, '')} {line.strip()}"
        described[last] = written.strip()
    return main.strip(), described, found.get("Returns", "").strip()


def _with_description(schema: Schema, text: str) -> Schema:
    choices = _CHOICES.search(text)
    if choices:
        schema["enum"] = json.loads(choices[1])
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _of(hint: Any, name: str) -> Schema:
    """The schema of a type hint."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return {} if hint is Any else {"type": _NAMES.get(hint, "object")}
    if origin in (typing.Union, types.UnionType):
        return _union([_of(part, name) for part in parts if part is not type(None)], parts)
    if origin is typing.Literal:
        kinds = list(dict.fromkeys(_NAMES.get(type(part), "object") for part in parts))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(parts)}
    if origin not in (list, tuple, dict) or ... in parts:
        raise ValueError(
            f"tool {name!r}: no JSON schema for {hint}; use int, float, str, bool, list, dict, "
            "Literal or a union of them"
        )
    within = [_of(part, name) for part in parts]
    if origin is tuple:
        return {"type": "array", "prefixItems": within}
    inner = "items" if origin is list else "additionalProperties"
    return {"type": _NAMES[origin], inner: within[-1]}


def _union(schemas: list[Schema], parts: tuple[Any, ...]) -> Schema:
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in schemas):
        kinds = sorted({each["type"] for each in schemas})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in parts else schema


def wrong_arguments(schema: Schema, arguments: Mapping[str, Any]) -> str:
    """Why a tool cannot be called with these arguments; "" where it can.

    >>> sum_of = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    >>> wrong_arguments({"function": {"parameters": sum_of}}, {"a": "1"})
    "argument 'a' must be an integer, got '1'"
    """
    parameters = schema["function"]["parameters"]
    properties = parameters.get("properties", {})
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name!r}; {did_you_mean(name, properties)}"
        if not _fits(value, properties[name]):
            return f"argument {name!r} must be {_words(properties[name])}, got {value!r:.100}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    return f"argument {missing[0]!r} is missing" if missing else ""


def _fits(value: Any, schema: Schema) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    allowed = schema.get("enum", [value])
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if not any(value == each and type(value) is type(each) for each in allowed):
        return False
    return _holds(value, schema)


def _holds(value: Any, schema: Schema) -> bool:
    """Whether what a list or an object holds fits."""
    each, rest = schema.get("prefixItems"), schema.get("additionalProperties")
    if isinstance(value, list) and each is not None:
        return len(value) == len(each) and all(map(_fits, value, each))
    if isinstance(value, list):
        return all(_fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict) and isinstance(rest, dict):
        return all(_fits(item, rest) for item in value.values())
    return True


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


def _words(schema: Schema) -> str:
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    kinds = schema.get("type")
    if not isinstance(kinds, str):
        return f"of the schema {json.dumps(schema, ensure_ascii=False)}"
    article = "an" if kinds[0] in "aio" else "a"
    inner = schema.get("items") or schema.get("additionalProperties") or schema.get("prefixItems")
    of = f" as in the schema {json.dumps(schema, ensure_ascii=False)}" if inner else ""
    return f"{article} {kinds}{of}"
