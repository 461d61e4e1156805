"""What the pieces that a section names declare, and calls that try them; importing loads torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import Facts, asks_teacher, facts, needed, smallest_group
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config.fields import Spec
from posttrain.config.resolved import RlSection
from posttrain.registry import Function, look_up, resolve
from posttrain.types import Batch


def advantage_needs(rl: RlSection) -> frozenset[str]:
    """The fields of the batch that the advantage needs beside rewards and groups."""
    return needed(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def pieces_need(rl: RlSection) -> frozenset[str]:
    """The fields of the batch that the advantage or the loss needs."""
    return advantage_needs(rl) | needed(resolve(rl.loss, POLICY_LOSSES, kind="rl.loss"))


def wants_greedy(rl: RlSection) -> bool:
    """Whether the advantage takes the greedy completion of every prompt for a baseline."""
    return "greedy_rewards" in advantage_needs(rl)


def min_group_size(rl: RlSection) -> int:
    """How many completions of a prompt the advantage compares at least."""
    return smallest_group(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def advantages_that_need(field: str) -> str:
    """The advantages of the table that take a field from the batch, in words."""
    return " or ".join(sorted(name for name in ADVANTAGES if field in needed(ADVANTAGES[name])))


def pieces_that_ask_a_teacher(rl: RlSection) -> list[str]:
    """The advantage and the loss, as a recipe has them, where they take something from a teacher.

    None of them does where the list is empty.
    """
    advantage = resolve(rl.advantage, ADVANTAGES, kind="rl.advantage")
    asking = {f"rl.advantage = {rl.advantage['name']!r}": asks_teacher(advantage)}
    loss = resolve(rl.loss, POLICY_LOSSES, kind="rl.loss")
    asking[f"rl.loss = {rl.loss['name']!r}"] = asks_teacher(loss)
    return [name for name, asks in asking.items() if asks]


def loss_facts(rl: RlSection) -> Facts:
    """The declared facts of the policy loss."""
    return facts(look_up(rl.loss["name"], POLICY_LOSSES, kind="rl.loss"))


def probe(rl: RlSection) -> list[Callable[[], object]]:
    """Calls that try each built-in piece on a few tokens and raise for a bad option.

    Of one's own, only what it takes is looked at.

    Groups are as large as the advantage needs; a rule checks the group size of the recipe.
    """

    def call(name: str, spec: Spec, *, table: Mapping[str, Function]) -> Callable[[], object]:
        def check() -> None:
            function = resolve(spec, table, kind=f"rl.{name}")
            try:
                function(batch.need("values"), batch) if "loss" in name else function(batch)
            except ValueError as error:
                raise ValueError(f"rl.{name}.{error}") from None
            except (OverflowError, RuntimeError) as error:
                told = f"{error}; look at its options, of which one is too large"
                raise ValueError(f"rl.{name} {spec['name']!r}: {told}") from None

        return check

    batch = _tiny_batch(min_group_size(rl))
    pieces: list[tuple[str, Spec, Mapping[str, Function]]] = [
        ("advantage", rl.advantage, ADVANTAGES),
        ("loss", rl.loss, POLICY_LOSSES),
        ("weights", rl.weights, WEIGHTS),
        ("correction", rl.correction, CORRECTIONS),
    ]
    if rl.critic is not None:
        pieces.append(("critic.loss", rl.critic.loss, VALUE_LOSSES))
    own = [piece for piece in pieces if ":" in piece[1]["name"]]
    calls = [call(name, spec, table=table) for name, spec, table in pieces if spec["name"] in table]
    return calls + [functools.partial(_check_call, name, spec) for name, spec, _ in own]


def _check_call(name: str, spec: Spec) -> None:
    """Raise where a piece of one's own does not take what it will be given."""
    function = resolve(spec, {}, kind=f"rl.{name}")
    takes = ("loss" in name) * ["values" if "critic" in name else "logprobs"] + ["batch"]
    try:
        inspect.signature(function).bind(*takes)
    except TypeError as error:
        short = spec["name"].rpartition(":")[2]
        raise ValueError(
            f"rl.{name} {spec['name']!r}: {error}; it is called as {short}({', '.join(takes)}), "
            "and its options are keyword-only, with defaults: "
            f"def {short}({', '.join(takes)}, *, option=1.0)"
        ) from None


def _tiny_batch(group_size: int) -> Batch:
    size = 2 * max(2, group_size)
    token = torch.zeros(size, 1)
    rewards, groups = torch.arange(size) % 2, torch.arange(size) * 2 // size
    return Batch.from_rewards(rewards, groups=groups.tolist()).replace(
        old_logprobs=token,
        sampler_logprobs=token,
        teacher_logprobs=token,
        divergence=token,
        values=token,
        returns=token,
        token_rewards=token,
        advantages=token,
        baseline=torch.tensor(0.0),
        score_norms=torch.ones(size),
        greedy_rewards=torch.zeros(size),
    )
