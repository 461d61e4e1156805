"""Environments: ``ENVS[name](**options)``; keyword-only parameters are options.

To add one, write a class with ``start`` and ``reply`` (:class:`posttrain.protocols.Env`), and name
it in :data:`ENVS`. ``task.env`` of a recipe names one, or a ``"module:Class"``.
"""

from collections.abc import Callable

from posttrain.envs.openenv import OpenEnv
from posttrain.envs.scripted_env import ScriptedEnv
from posttrain.envs.verifiers_env import VerifiersEnv
from posttrain.protocols import Env
from posttrain.registry import Spec, resolve

ENVS: dict[str, Callable[..., Env]] = {
    "scripted": ScriptedEnv,
    "verifiers": VerifiersEnv,
    "openenv": OpenEnv,
}

__all__ = ["ENVS", "ScriptedEnv", "make_env"]


def make_env(spec: Spec) -> Env:
    """The environment a spec names, made with its options.

    >>> env = make_env({"name": "scripted", "replies": ["go on"]})
    >>> type(env).__name__
    'ScriptedEnv'
    """
    env: Env = resolve(spec, ENVS, kind="task.env")()
    return env
