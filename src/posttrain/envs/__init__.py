"""Environments: ``ENVS[name](**options)``; keyword-only parameters are options.

To add one, write a class with ``start`` and ``reply`` (:class:`posttrain.protocols.Env`), a class
with ``reset`` and tools (:class:`posttrain.envs.from_class.ClassEnv`) or a function of messages
(:class:`posttrain.envs.from_function.FunctionEnv`), and name it in :data:`ENVS`. ``task.env`` of a
recipe names one, or a ``"module:Name"`` of any of these shapes.
"""

from collections.abc import Callable
from typing import Any

from posttrain.envs.adapters.gymnasium_text import GymnasiumText
from posttrain.envs.adapters.mcp_tools import McpTools
from posttrain.envs.adapters.openenv import OpenEnv
from posttrain.envs.adapters.verifiers_env import VerifiersEnv
from posttrain.envs.alphabet_sort import AlphabetSort
from posttrain.envs.calculator import Calculator
from posttrain.envs.guess_number import GuessNumber
from posttrain.envs.python import Python
from posttrain.envs.scripted_env import ScriptedEnv
from posttrain.envs.shapes import CONTEXT, HANDED_OVER, env_factory, handed_over, is_elsewhere
from posttrain.envs.tic_tac_toe import TicTacToe
from posttrain.envs.wordle import Wordle
from posttrain.protocols import Env
from posttrain.registry import Spec, check_options, look_up, options, split

ENVS: dict[str, Callable[..., Any]] = {
    "scripted": ScriptedEnv,
    "calculator": Calculator,
    "python": Python,
    "wordle": Wordle,
    "alphabet_sort": AlphabetSort,
    "guess_number": GuessNumber,
    "tic_tac_toe": TicTacToe,
    "verifiers": VerifiersEnv,
    "openenv": OpenEnv,
    "mcp": McpTools,
    "gymnasium": GymnasiumText,
}

__all__ = ["CONTEXT", "ENVS", "ScriptedEnv", "find_env", "is_elsewhere", "make_env"]


def find_env(name: str) -> Callable[..., Env]:
    """What makes the environment of a name, whatever its shape: its keywords are the options."""
    if name.startswith(HANDED_OVER):
        return env_factory(handed_over(name), name=name.removeprefix(HANDED_OVER))
    return env_factory(look_up(name, ENVS, kind="task.env"), name=name)


def make_env(spec: Spec | Callable[..., Any], **context: Any) -> Env:
    """The environment a spec names, made with its options; or that of a class or function itself.

    ``context`` is what a run knows (:data:`CONTEXT`: ``tool_format`` and ``chat``): an environment
    that has such an option gets it, unless the spec sets another.

    >>> env = make_env({"name": "scripted", "replies": ["go on"]})
    >>> type(env).__name__
    'ScriptedEnv'
    """
    if callable(spec):
        name, chosen = getattr(spec, "__name__", type(spec).__name__), dict[str, Any]()
        factory = env_factory(spec, name=name)
    else:
        name, chosen = split(spec, kind="task.env")
        factory = find_env(name)
    check_options(factory, chosen, kind=f"task.env {name!r}")
    known = options(factory)
    known_here = {key: value for key, value in context.items() if key in known}
    return factory(**{**known_here, **chosen})
