"""Small tables in place of the library's, so that these tests say what they are about."""

import re
import types
from contextlib import AbstractContextManager
from typing import Any

import pytest
from small_runs import taught

from posttrain.config import ConfigError, Recipe, Resolved, recipe_from_dict, resolve


def sums(*, digits: int = 2, operators: str = "+-", think: bool = False) -> None: ...
def words(*, path: str, lower: bool = False, names: tuple[str, ...] = ()) -> None: ...
def numeric(completion: str, answer: str, *, tolerance: float = 0.0) -> None: ...
def brief(num_tokens: int, *, target: int) -> None: ...
def native(model: object, *, batch_size: int = 64) -> None: ...
def server(model: object, *, url: str = "http://localhost") -> None: ...
def tiny(*, hidden_size: int = 64, num_layers: int = 2) -> None: ...
def reward_scorer(
    device: str,
    render: object,
    *,
    path: str = "reward",
    normalise: bool = True,
    dtype: str = "float32",
    offload: bool = False,
    micro_batch_tokens: int = 8192,
) -> None: ...


server.reports_truncated_logprobs = False  # type: ignore[attr-defined]


def full_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Short ways to write a task, written out, as the library's tasks do."""
    return {"name": "words", "path": "a.txt"} if spec["name"] == "words:a" else spec


TABLES: dict[str, dict[str, Any]] = {
    "posttrain.tasks": {"TASKS": {"sums": sums, "words": words}, "full_spec": full_spec},
    "posttrain.rewards": {"REWARDS": {"numeric": numeric, "brief": brief}},
    "posttrain.rollout.engines": {"ENGINES": {"native": native, "server": server}},
    "posttrain.models.tiny": {"build_tiny": tiny},
    "posttrain.models.reward_scorer": {"reward_scorer": reward_scorer},
}


def module(name: str) -> types.ModuleType:
    """A module that holds its fake table alone."""
    made = types.ModuleType(name)
    vars(made).update(TABLES[name])
    return made


def read(values: dict[str, Any] | None = None, *overrides: str) -> Recipe:
    """The recipe of a dict, on the task ``sums`` unless it names another, with overrides."""
    return recipe_from_dict({"task": "sums", **(values or {})}, overrides=overrides, name="demo")


def resolved(values: dict[str, Any] | None = None, *overrides: str) -> Resolved:
    """The same, resolved."""
    return resolve(read(values, *overrides))


def rl(**values: Any) -> Any:
    """The resolved section ``[rl]``; an algorithm that asks a teacher has one."""
    return resolved({"rl": values, **taught(values.get("algorithm", "grpo"))}).rl


def refuses(*problems: str) -> AbstractContextManager[Any]:
    """Exactly these problems are reported, word for word."""
    lines = problems if len(problems) == 1 else (f"{len(problems)} problems", *problems)
    return pytest.raises(ConfigError, match=f"^{re.escape((chr(10) + '  ').join(lines))}$")
