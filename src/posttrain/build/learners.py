"""From a resolved section to what learns: the learner, its critic, the algorithm, the audit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses import POLICY_LOSSES, VALUE_LOSSES
from posttrain.algorithms.pieces import Loss, centred_over, facts, needed
from posttrain.algorithms.shaping import missing_end, overlong, score_at_last_token
from posttrain.algorithms.weights import WEIGHTS
from posttrain.build.setup import choose_compile, choose_compute
from posttrain.config import KlSection, Optimiser, Resolved, RewardSection, RlSection, SftSection
from posttrain.config.preference_rules import OWN_STAGE
from posttrain.learn.learner import LocalLearner, scores
from posttrain.learn.optim import adamw, rate_factor
from posttrain.learn.trained import Trained
from posttrain.models.activations import checkpoint_activations
from posttrain.models.compiled import compile_layers
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy
from posttrain.models.logprobs import score_tokens
from posttrain.models.reward import RewardModel, save_reward
from posttrain.models.save import save_policy
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.plan import Plan, Stage
from posttrain.registry import resolve


def make_learner(
    recipe: Resolved,
    policy: Policy,
    *,
    section: RlSection | SftSection,
    device: str,
    total_steps: int,
    reward_model: Path | None = None,
) -> LocalLearner:
    """The learner of a policy: same code, same weights, its own optimiser and schedule."""
    ask: Callable[..., Any] = score_tokens
    reference = critic = None
    checkpoint_activations(policy.model, enabled=section.checkpoint_activations)
    if isinstance(section, RlSection):
        ask = functools.partial(
            score_tokens,
            temperature=section.temperature,
            entropy="gradient" if section.entropy_coefficient > 0 else "value",
        )
        reference = _reference(section.kl)
        critic = _critic(section, policy, total_steps=total_steps, reward_model=reward_model)
    compiled = isinstance(section, RlSection) and choose_compile(recipe, device)
    if compiled:
        compile_layers(policy.model)
    return LocalLearner(
        policy.model,
        _optimizer(policy.model, section),
        save=functools.partial(save_policy, policy),
        forward=ask,
        schedule=_schedule(section, total_steps - _alone(section)),
        max_gradient_norm=section.max_gradient_norm,
        micro_batch_tokens=section.micro_batch_tokens,
        beside_sampling=isinstance(section, RlSection) and section.max_lag > 0,
        compute=choose_compute(recipe.model, device),
        reference=reference,
        critic=critic,
        recorded=compiled and not section.checkpoint_activations,
    )


def make_reward_learner(
    recipe: Resolved,
    reward: RewardModel,
    *,
    section: RewardSection,
    device: str,
    total_steps: int,
) -> LocalLearner:
    """The learner of a reward model: it compares, so sets are never parted."""
    checkpoint_activations(reward.model, enabled=section.checkpoint_activations)
    return LocalLearner(
        reward.model,
        _optimizer(reward.model, section),
        save=functools.partial(save_reward, reward),
        forward=scores,
        schedule=_schedule(section, total_steps),
        max_gradient_norm=section.max_gradient_norm,
        micro_batch_tokens=section.micro_batch_tokens,
        keep_groups=True,
        compute=choose_compute(recipe.model, device),
    )


def _optimizer(model: nn.Module, section: Optimiser) -> torch.optim.Optimizer:
    return adamw(
        model,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        betas=section.adam_betas,
    )


def _schedule(section: Optimiser, total_steps: int) -> Callable[[int], float]:
    return functools.partial(
        rate_factor, total=total_steps, warmup=section.warmup_steps, schedule=section.schedule
    )


def _alone(section: RlSection | SftSection) -> int:
    """Optimiser steps that the critic takes alone, and the policy's schedule does not see."""
    if not isinstance(section, RlSection) or section.critic is None:
        return 0
    return section.critic.warmup_steps * section.epochs * section.minibatches


def _reference(kl: KlSection) -> Reference | None:
    if kl.placement == "none":
        return None
    dtype = torch.bfloat16 if kl.dtype == "bfloat16" else None
    return Reference(dtype=dtype, offload=bool(kl.offload))


def _critic(
    rl: RlSection, policy: Policy, *, total_steps: int, reward_model: Path | None
) -> Trained | None:
    chosen = rl.critic
    if chosen is None:
        return None
    if chosen.kind == "shared":
        critic = shared_critic(policy)
    else:
        own = chosen.source == OWN_STAGE and reward_model is not None
        critic = separate_critic(policy, str(reward_model) if own else chosen.source)
        if critic.trunk is not None:
            checkpoint_activations(critic.trunk, enabled=rl.checkpoint_activations)
    return Trained(
        critic,
        adamw(
            critic,
            learning_rate=chosen.learning_rate,
            weight_decay=rl.weight_decay,
            betas=rl.adam_betas,
        ),
        schedule=_schedule(rl, total_steps),
        max_gradient_norm=rl.max_gradient_norm,
    )


def needs_token_rewards(advantage: Mapping[str, Any]) -> bool:
    """Whether an advantage gives each token its own credit, so that the score needs a place."""
    return "token_rewards" in needed(resolve(advantage, ADVANTAGES, kind="rl.advantage"))


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
        advantage_only=_advantage_only(rl, loss),
    )


def _advantage_only(rl: RlSection, loss: Loss) -> bool:
    """Whether the loss says that it is 0 where the advantage is, and nothing is added to it."""
    bonus = rl.entropy_coefficient > 0 or rl.kl.placement == "loss" or rl.critic is not None
    return facts(loss).zero_with_advantage and not bonus


def _shaping(rl: RlSection) -> tuple[Stage, ...]:
    shaping: list[Stage] = []
    if rl.missing_end_penalty:
        shaping.append(functools.partial(missing_end, penalty=rl.missing_end_penalty))
    if rl.overlong_buffer:
        shaping.append(
            functools.partial(overlong, limit=rl.max_new_tokens, buffer=rl.overlong_buffer)
        )
    if needs_token_rewards(rl.advantage) or rl.critic is not None:
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
