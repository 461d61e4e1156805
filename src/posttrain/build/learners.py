"""From a resolved section to what learns: the learner, its reference and its critic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.build.setup import choose_compile, choose_compute, make_policy
from posttrain.config import (
    DpoSection,
    KlSection,
    Optimiser,
    Resolved,
    RewardSection,
    RlSection,
    SftSection,
)
from posttrain.config.piece_facts import pieces_need
from posttrain.config.specs import OWN_STAGE
from posttrain.fast.score import checkpoint_activations, compile_layers, score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw, rate_factor
from posttrain.learn.ranks import ALONE, Ranks
from posttrain.learn.trained import Trained
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference, check_teacher, fit_rows
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel, save_reward, scores
from posttrain.models.save import check_adapter, save_policy
from posttrain.protocols import Learner


def learning_section(recipe: Resolved, stage: str) -> RlSection | SftSection | DpoSection:
    """The section of a stage that trains a policy."""
    if stage == "sft":
        return recipe.sft
    return recipe.dpo if stage == "dpo" else recipe.rl


def make_learner(
    recipe: Resolved,
    policy: Policy,
    *,
    section: RlSection | SftSection | DpoSection,
    device: str,
    total_steps: int,
    reward_model: Path | None = None,
    replicas: int = 1,
    ranks: Ranks = ALONE,
) -> Learner:
    """The learner of a policy: same code, same weights, its own optimiser and schedule."""
    check_adapter(policy, dict(recipe.adapter))
    _check_moments(section, ranks)
    ask: Callable[..., Any] = score_tokens
    reference = critic = teacher = None
    teacher_infers = True
    checkpoint_activations(policy.model, enabled=section.checkpoint_activations)
    if isinstance(section, RlSection):
        ask = functools.partial(
            score_tokens,
            temperature=section.temperature,
            entropy="gradient" if section.entropy_coefficient > 0 else "value",
        )
        reference = make_reference(section.kl)
        critic = _critic(section, policy, total_steps=total_steps, reward_model=reward_model)
        teacher = make_teacher(recipe, policy, device=device)
        teacher_infers = "teacher_logprobs" in pieces_need(section)
    compiled = isinstance(section, RlSection) and choose_compile(recipe, device)
    compiled = compiled and ranks.size == 1  # FSDP gathers layers around their code, not inside
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
        beside_sampling=isinstance(section, RlSection) and section.ahead > 0,
        keep_groups=isinstance(section, DpoSection),
        compute=choose_compute(recipe.model, device),
        reference=reference,
        critic=critic,
        teacher=teacher,
        teacher_infers=teacher_infers,
        captured=compiled and not section.checkpoint_activations,
        replicas=replicas,
        ranks=ranks,
    )


def make_reward_learner(
    recipe: Resolved,
    reward: RewardModel,
    *,
    section: RewardSection,
    device: str,
    total_steps: int,
    replicas: int = 1,
    ranks: Ranks = ALONE,
) -> Learner:
    """The learner of a reward model: it compares, so sets are never parted."""
    check_adapter(reward, dict(recipe.adapter))
    _check_moments(section, ranks)
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
        replicas=replicas,
        ranks=ranks,
    )


def _check_moments(section: Optimiser, ranks: Ranks) -> None:
    if section.adam_moments == "8bit" and ranks.size > 1:
        raise ValueError(
            f'adam_moments: "8bit" moments are not sharded, and there are {ranks.size} ranks; '
            'start one process, or set it to "full"'
        )


def make_teacher(recipe: Resolved, policy: Policy, *, device: str) -> nn.Module | None:
    """The teacher of a recipe, if it has one: of the policy's tokens, and with as many rows."""
    if recipe.teacher is None or not recipe.teacher.model:
        return None
    kept = recipe.model.model_copy(update={"dtype": recipe.teacher.dtype})
    plain = type(recipe.adapter)()  # the policy's adapters are its own
    named = recipe.model_copy(update={"model": kept, "adapter": plain})
    try:
        teacher = make_policy(named, recipe.teacher.model, device=device)
    except ValueError as error:
        raise ValueError(f"teacher.{error}" if str(error).startswith("model") else error) from error
    check_teacher(teacher, policy)
    fit_rows(teacher.model, policy.model.get_output_embeddings().weight.shape[0])
    return teacher.model


def _optimizer(
    model: nn.Module, section: Optimiser, *, learning_rate: float | None = None
) -> torch.optim.Optimizer:
    return adamw(
        model,
        learning_rate=learning_rate or section.learning_rate,
        weight_decay=section.weight_decay,
        betas=section.adam_betas,
        moments=section.adam_moments,
    )


def _schedule(section: Optimiser, total_steps: int) -> Callable[[int], float]:
    return functools.partial(
        rate_factor, total=total_steps, warmup=section.warmup_steps, schedule=section.schedule
    )


def _alone(section: Optimiser) -> int:
    """Optimiser steps that the critic takes alone, and the policy's schedule does not see."""
    if not isinstance(section, RlSection) or section.critic is None:
        return 0
    return section.critic.warmup_steps * section.epochs * section.minibatches


def make_reference(kl: KlSection) -> Reference | None:
    """How the reference of a recipe is kept; None: it has none."""
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
        _optimizer(critic, rl, learning_rate=chosen.learning_rate),
        schedule=_schedule(rl, total_steps),
        max_gradient_norm=rl.max_gradient_norm,
    )
