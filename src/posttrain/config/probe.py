"""Pieces of a recipe tried on four tokens: only a call tells whether the options make sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config.fields import Spec
from posttrain.config.sections import RlSection
from posttrain.registry import Function, resolve
from posttrain.types import Batch


def probe(rl: RlSection) -> list[Callable[[], object]]:
    """Each piece of the library, to be called on four tokens: a bad option raises here and now."""

    def call(name: str, spec: Spec, *, table: Mapping[str, Function]) -> Callable[[], object]:
        def check() -> None:
            function = resolve(spec, table, kind=f"rl.{name}")
            try:
                function(torch.zeros(4, 1), batch) if "loss" in name else function(batch)
            except ValueError as error:
                raise ValueError(f"rl.{name}.{error}") from None

        return check

    batch = _tiny_batch()
    pieces: list[tuple[str, Spec, Mapping[str, Function]]] = [
        ("advantage", rl.advantage, ADVANTAGES),
        ("loss", rl.loss, POLICY_LOSSES),
        ("weights", rl.weights, WEIGHTS),
        ("correction", rl.correction, CORRECTIONS),
    ]
    if rl.critic is not None:
        pieces.append(("critic.loss", rl.critic.loss, VALUE_LOSSES))
    return [call(name, spec, table=table) for name, spec, table in pieces if spec["name"] in table]


def _tiny_batch() -> Batch:
    token = torch.zeros(4, 1)
    return Batch.from_rewards([1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1]).replace(
        old_logprobs=token,
        sampler_logprobs=token,
        values=token,
        returns=token,
        token_rewards=token,
        advantages=token,
        baseline=torch.tensor(0.0),
        score_norms=torch.ones(4),
    )
