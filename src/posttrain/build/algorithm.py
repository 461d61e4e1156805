"""From a resolved section to the algorithm: every piece with its options bound, and its audit.

Which pieces an algorithm has is in :mod:`posttrain.algorithms.table`.
"""

from __future__ import annotations

import functools

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import centred_over, facts
from posttrain.algorithms.shaping import missing_end, overlong, score_at_last_token
from posttrain.algorithms.weights import WEIGHTS
from posttrain.build.setup import choose_compute
from posttrain.config import KlSection, Resolved, RlSection
from posttrain.config.piece_facts import advantage_needs
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.plan import Plan, Stage
from posttrain.registry import resolve


def make_plan(rl: RlSection) -> Plan:
    """The algorithm of a resolved section, every option bound."""
    correction = None
    if rl.correction["name"] != "none":
        correction = resolve(rl.correction, CORRECTIONS, kind="rl.correction")
    kl, critic = rl.kl, rl.critic
    value_loss = None
    if critic is not None:
        value_loss = resolve(critic.loss, VALUE_LOSSES, kind="rl.critic.loss")
    loss = resolve(rl.loss, POLICY_LOSSES, kind="rl.loss")
    added = rl.entropy_coefficient > 0 or kl.placement == "loss" or critic is not None
    return Plan(
        advantage=resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"),
        loss=loss,
        weights=resolve(rl.weights, WEIGHTS, kind="rl.weights"),
        shaping=_shaping(rl),
        whiten_rewards="population" if rl.whiten_rewards is True else rl.whiten_rewards or None,
        correction=correction,
        value_loss=value_loss,
        value_coefficient=critic.coefficient if critic is not None else 1.0,
        critic_warmup=critic.warmup_steps if critic is not None else 0,
        penalty=_penalty(rl),
        kl_placement=kl.placement,
        kl_estimator=kl.estimator,
        kl_direction=kl.direction,
        kl_weighted=kl.weighted,
        kl=_coefficient(kl),
        refresh_every=kl.refresh_every,
        entropy_coefficient=rl.entropy_coefficient,
        kl_stop=rl.kl_stop if rl.kl_stop is not None else float("inf"),
        epochs=rl.epochs,
        minibatches=rl.minibatches,
        advantage_only=facts(loss).zero_with_advantage and not added,
    )


def _shaping(rl: RlSection) -> tuple[Stage, ...]:
    shaping: list[Stage] = []
    if rl.missing_end_penalty:
        shaping.append(functools.partial(missing_end, penalty=rl.missing_end_penalty))
    if rl.overlong_buffer:
        shaping.append(
            functools.partial(overlong, limit=rl.max_new_tokens, buffer=rl.overlong_buffer)
        )
    if "token_rewards" in advantage_needs(rl) or rl.critic is not None:
        shaping.append(score_at_last_token)
    return tuple(shaping)


def _coefficient(kl: KlSection) -> Coefficient:
    if kl.placement == "none":
        return Coefficient(value=0.0)
    return Coefficient(value=kl.coefficient, rule=kl.rule, target=kl.target, horizon=kl.horizon)


def _penalty(rl: RlSection) -> Coefficient | None:
    if rl.penalty_target is None:
        return None
    return Coefficient(
        value=rl.loss.get("coefficient", 1.0), rule="doubling", target=rl.penalty_target
    )


def make_audit(recipe: Resolved, rl: RlSection, *, plan: Plan, device: str) -> Audit | None:
    """The audit of a run that asks for one."""
    if not rl.audit:
        return None
    exact = choose_compute(recipe.model, device) == torch.float32
    tolerance = 1e-4 if exact else 2e-2
    return Audit(
        plan,
        normalised=centred_over(plan.advantage) or "none",
        deviation=rl.advantage.get("deviation", "population"),
        tolerance=tolerance,
        max_lag=rl.max_lag,
    )
