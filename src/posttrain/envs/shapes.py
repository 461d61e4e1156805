"""The shapes in which an environment may come: each becomes a function that makes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from posttrain.envs.from_class import from_class
from posttrain.envs.from_function import from_function, positional
from posttrain.protocols import Env
from posttrain.registry import look_up

CONTEXT = ("tool_format", "chat")
"""Options that a run sets by what it knows of its model."""
HANDED_OVER = "object "  # what a recipe calls an environment that was handed over from Python
_handed: dict[str, Any] = {}


def hand_over(env: Any, *, name: str) -> str:
    """A name for an environment, its class or function, by which this process finds it."""
    key = f"{HANDED_OVER}{name}"
    _handed[key] = env
    return key


def is_elsewhere(name: str) -> bool:
    """Whether a name is that of an object that another process was handed."""
    return name.startswith(HANDED_OVER) and name not in _handed


def handed_over(name: str) -> Callable[..., Any]:
    """The class or function of a name that :func:`hand_over` gave, or what returns the object."""
    if is_elsewhere(name):
        raise ValueError(
            f"task.env: {name.removeprefix(HANDED_OVER)} was handed over from Python, and no "
            "folder can hold it; give it again (env=…), or write it to a module and name it "
            "module:Name"
        )
    env = _handed[name]
    return (lambda: env) if hasattr(env, "reply") and not isinstance(env, type) else env


def env_factory(found: Callable[..., Any], *, name: str) -> Callable[..., Env]:
    """What makes an environment, by its options as keywords, from any of the shapes.

    A class or a function of options alone makes environments, or instances with ``reset``; a
    function that must be given something is one itself.

    >>> make = env_factory(lambda messages: None, name="ends at once")
    >>> type(make()).__name__
    'FunctionEnv'
    """
    if isinstance(found, type) and hasattr(found, "start") and hasattr(found, "reply"):
        return found
    if not isinstance(found, type) and _must_be_given(found):
        return _with_options(found, _of_function, adapt=from_function)
    if isinstance(found, type) and not hasattr(found, "reset"):
        raise ValueError(
            f"task.env {name!r}: a class needs start and reply, or reset and public methods as "
            "tools; docs/environments.md shows both"
        )
    return _with_options(found, _of_class, adapt=_from_class)


def _must_be_given(function: Callable[..., Any]) -> bool:
    return any(each.default is each.empty for each in positional(function))


def _of_class(
    *,
    rewards: str | list[str] = "",
    until: str = "",
    tool_format: str | None = None,
    chat: bool | None = None,
) -> None:
    """The options of a class, beside its own: named reward functions, what ends an episode."""


def _of_function(*, chat: bool | None = None) -> None:
    """The options of a function, beside its own."""


def _from_class(
    make: functools.partial[Any], *, rewards: str | list[str] = "", until: str = "", **given: Any
) -> Env:
    kind = make.func
    if not isinstance(kind, type):
        made = make()
        kind = type(made)
        if hasattr(made, "start") and hasattr(made, "reply"):
            if rewards or until:
                raise ValueError(
                    "task.env: rewards and until are options of a class with reset, and "
                    f"{kind.__name__} has start and reply"
                )
            env: Env = made
            return env
        if not hasattr(made, "reset"):
            raise ValueError(
                f"task.env: {make.func.__name__}() returned a {kind.__name__}, no environment; a "
                "function that is one itself takes messages, the conversation so far"
            )
    names = [rewards] if isinstance(rewards, str) else rewards
    functions = [look_up(each, {}, kind="task.env.rewards") for each in names if each]
    return from_class(make, kind, rewards=functions, until=until, **given)


def _with_options(
    found: Callable[..., Any], declared: Callable[..., None], *, adapt: Callable[..., Env]
) -> Callable[..., Env]:
    """A function of the options of ``found`` and of those ``declared`` for its shape."""
    beside = inspect.signature(declared, eval_str=True).parameters
    own = {each.name: each for each in _own_options(found)}
    for name in own.keys() & beside.keys() - set(CONTEXT):
        raise ValueError(
            f"task.env: rename the option {name!r} of {found.__name__}, which means something for "
            "every environment of its shape"
        )

    def make(**given: Any) -> Env:
        wanted = {key: value for key, value in given.items() if key in own}
        rest = {key: value for key, value in given.items() if key in beside and value is not None}
        return adapt(functools.partial(found, **wanted), **rest)

    parameters = {**beside, **own}.values()
    make.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    return make


def _own_options(found: Callable[..., Any]) -> list[inspect.Parameter]:
    """The options of a class or function; those of a class need not be keyword-only."""
    try:
        signature = inspect.signature(found, eval_str=True)
    except NameError:  # an annotation imported only under TYPE_CHECKING
        signature = inspect.signature(found)
    named = inspect.Parameter.KEYWORD_ONLY
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        each.replace(kind=named)
        for each in signature.parameters.values()
        if each.kind is named or (each.kind is either and isinstance(found, type))
    ]
