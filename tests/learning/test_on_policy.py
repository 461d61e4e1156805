"""The first optimiser step is on-policy: ρ = 1 for every algorithm and every micro-batch size."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from small_runs import taught
from torch import nn

from posttrain.algorithms.pieces import asks_teacher
from posttrain.algorithms.table import ALGORITHMS
from posttrain.build.algorithm import make_plan
from posttrain.config import RlSection, recipe_from_dict, resolve
from posttrain.data.collate import collate
from posttrain.data.template import Template
from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy, load_policy
from posttrain.pipelines.plan import Plan, State, make_objective
from posttrain.pipelines.rl import prepare
from posttrain.rollout.engines.native import NativeEngine
from posttrain.types import Prompt, Rollout, Sampling, Score

# Every algorithm, and those that have a critic with either kind of it.
CHOICES: dict[str, dict[str, Any]] = {name: {"algorithm": name} for name in ALGORITHMS} | {
    f"{name}, shared": {"algorithm": name, "critic": {"kind": "shared"}}
    for name, row in ALGORITHMS.items()
    if row.critic
}
CHOICES["pkpo"]["advantage"] = {"k": 3}  # of groups of four
CHAT = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ["2+3=", "10+20+30=", "7=", "what is 1234 + 4321?"]


@functools.cache
def policy(dtype: str = "float32") -> Policy:
    """A tiny model whose pad token is its end token."""
    options = {"hidden_size": 32, "num_layers": 2, "max_positions": 128}
    loaded = load_policy("tiny", seed=3, options=options, dtype=dtype)
    loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    loaded.tokenizer.chat_template = CHAT
    return dataclasses.replace(loaded, pad_token=loaded.end_tokens[0])


@functools.cache
def teacher(dtype: str) -> nn.Module:
    """Another model of the same tokens."""
    options = {"hidden_size": 48, "num_layers": 1, "max_positions": 128}
    return load_policy("tiny", seed=4, options=options, dtype=dtype).model


@functools.cache
def rollouts(temperature: float) -> tuple[Rollout, ...]:
    """Scored completions of ragged prompts through the chat template, some cut, some ended."""
    template = Template(policy().tokenizer, chat=True, end_tokens=policy().end_tokens)
    prompts = [
        template.render(Prompt(id=str(index), text=text)) for index, text in enumerate(QUESTIONS)
    ]
    engine = NativeEngine(policy().model, end_tokens=policy().end_tokens, decode=template.decode)
    sampling = Sampling(max_new_tokens=12, temperature=temperature)
    groups = engine.generate(prompts, sampling, num_samples=4, seed=5)
    flat = [rollout for group in groups for rollout in group]
    return tuple(
        dataclasses.replace(
            rollout,
            score=Score(value=float(index % 3)),
            greedy=dataclasses.replace(rollout, score=Score(value=0.5)),
        )
        for index, rollout in enumerate(flat)
    )


def section_of(name: str) -> RlSection:
    """The resolved section of a choice."""
    rl = {**CHOICES[name], "group_size": 4, "max_new_tokens": 12}
    return resolve(recipe_from_dict({"rl": rl, "task": "sort", **taught(rl["algorithm"])})).rl


def critic_of(section: RlSection, dtype: str) -> Trained | None:
    """The critic that a section asks for, with a head that gives every state another value."""
    if section.critic is None:
        return None
    make = shared_critic if section.critic.kind == "shared" else separate_critic
    critic = make(policy(dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        critic.head.weight.normal_(generator=generator)
    return Trained(critic, adamw(critic, learning_rate=0.0), max_gradient_norm=math.inf)


def learner(
    plan: Plan,
    *,
    micro_batch_tokens: int,
    temperature: float = 1.0,
    dtype: str = "float32",
    critic: Trained | None = None,
) -> LocalLearner:
    """A learner that takes no real step: its learning rate is 0, and no gradient is cut."""
    return LocalLearner(
        policy(dtype).model,
        adamw(policy(dtype).model, learning_rate=0.0),
        save=lambda folder: None,
        micro_batch_tokens=micro_batch_tokens,
        forward=functools.partial(score_tokens, temperature=temperature),
        reference=Reference() if plan.kl_placement != "none" else None,
        max_gradient_norm=math.inf,
        critic=critic,
        teacher=teacher(dtype) if asks_teacher(plan.advantage, plan.loss) else None,
    )


def test_the_rollouts_cover_the_hard_cases() -> None:
    """Different prompt lengths, different completion lengths, pad == eos, an end token inside."""
    made = rollouts(1.0)
    assert len({len(rollout.prompt.tokens) for rollout in made}) > 2
    assert policy().pad_token in policy().end_tokens
    assert any(rollout.stop_reason == "length" for rollout in made)


@pytest.mark.parametrize(
    ("micro_batch_tokens", "temperature"), [(1, 1.0), (100, 0.7), (100_000, 1.0)]
)
@pytest.mark.parametrize("name", CHOICES)
def test_first_ratio_is_one(name: str, micro_batch_tokens: int, temperature: float) -> None:
    """ρ = 1 within 1e-4 in float32, against the trainer's own old log-probs and the sampler's."""
    section = section_of(name)
    plan = dataclasses.replace(make_plan(section), epochs=2)  # so that π_old is asked for
    student = learner(
        plan,
        micro_batch_tokens=micro_batch_tokens,
        temperature=temperature,
        critic=critic_of(section, "float32"),
    )
    state = State(kl=plan.kl, penalty=plan.penalty)
    batch = collate(rollouts(temperature), pad_token=policy().pad_token)
    batch = prepare(batch, student, plan=plan, state=state)
    result = student.step(plan.weights(batch), make_objective(plan, state, batch=batch))
    assert abs(result.metrics["ratio"] - 1) < 1e-4
    assert abs(result.metrics["ratio_max"] - 1) < 1e-4
    assert result.metrics["approx_kl"] < 1e-8
    assert result.metrics["mismatch_max"] < 1e-4
    if plan.value_loss is not None:  # V is V_old too: the targets are the advantages and V
        assert float(batch.values[batch.mask].std()) > 0.1
        assert result.metrics["value"] == pytest.approx(float(batch.values[batch.mask].mean()))
        assert result.metrics["value_clip"] == 0


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", slow_but(CHOICES, "grpo", "ppo"))
def test_micro_batches_do_not_change_the_step(name: str) -> None:
    """Loss, gradient and diagnostics are the same for any number of tokens in a forward pass."""
    section = section_of(name)
    plan = make_plan(section)
    state = State(kl=plan.kl, penalty=plan.penalty)
    outcomes = []
    for tokens in (1, 100, 100_000):
        critic = critic_of(section, "float64")
        student = learner(plan, micro_batch_tokens=tokens, dtype="float64", critic=critic)
        batch = collate(rollouts(1.0), pad_token=policy().pad_token)
        batch = prepare(batch, student, plan=plan, state=state)
        result = student.step(plan.weights(batch), make_objective(plan, state, batch=batch))
        weights = [*student.model.parameters(), *(critic.module.parameters() if critic else ())]
        gradient = torch.cat([weight.grad.flatten() for weight in weights])
        outcomes.append((result, gradient.clone()))
    first, reference = outcomes[0]
    for result, gradient in outcomes[1:]:
        assert result.loss == pytest.approx(first.loss, rel=1e-10)
        assert result.gradient_norm == pytest.approx(first.gradient_norm, rel=1e-10)
        assert torch.allclose(gradient, reference, rtol=1e-8, atol=1e-14)
        assert result.metrics == pytest.approx(first.metrics, rel=1e-9, abs=1e-12)
