"""Calls the pieces of a recipe on a few tokens: only a call shows whether options are valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config.fields import Spec
from posttrain.config.piece_facts import min_group_size
from posttrain.config.resolved import RlSection
from posttrain.registry import Function, resolve
from posttrain.types import Batch


def probe(rl: RlSection) -> list[Callable[[], object]]:
    """Calls that try each built-in piece on a few tokens and raise for a bad option.

    Groups are as large as the advantage needs; a rule checks the group size of the recipe.
    """

    def call(name: str, spec: Spec, *, table: Mapping[str, Function]) -> Callable[[], object]:
        def check() -> None:
            function = resolve(spec, table, kind=f"rl.{name}")
            try:
                function(batch.need("values"), batch) if "loss" in name else function(batch)
            except ValueError as error:
                raise ValueError(f"rl.{name}.{error}") from None

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
    return [call(name, spec, table=table) for name, spec, table in pieces if spec["name"] in table]


def _tiny_batch(group_size: int) -> Batch:
    size = 2 * max(2, group_size)
    token = torch.zeros(size, 1)
    rewards, groups = torch.arange(size) % 2, torch.arange(size) * 2 // size
    return Batch.from_rewards(rewards, groups=groups.tolist()).replace(
        old_logprobs=token,
        sampler_logprobs=token,
        values=token,
        returns=token,
        token_rewards=token,
        advantages=token,
        baseline=torch.tensor(0.0),
        score_norms=torch.ones(size),
        greedy_rewards=torch.zeros(size),
    )
