"""From a resolved recipe to the parts that run it: each is made here and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.corrections import CORRECTIONS
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.algorithms.shaping import missing_end, overlong, score_at_last_token
from posttrain.algorithms.weights import WEIGHTS
from posttrain.config import EvalSection, ModelSection, Recipe, RlSection, SftSection
from posttrain.data.template import PromptTooLong, Template
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw, rate_factor
from posttrain.models.cache import context_length
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy
from posttrain.pipelines.rl import Plan, Stage
from posttrain.protocols import Engine, Scorer, Task
from posttrain.registry import Spec, resolve, split
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines import ENGINES
from posttrain.tasks import make_task
from posttrain.types import Prompt, Sampling

Section = TypeVar("Section", SftSection, RlSection, EvalSection)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every stage shares; ``correct_by`` names the reward that decides what is right."""

    device: str
    template: Template
    task: Task | None = None
    scorer: Scorer | None = None
    correct_by: str = ""


def filled(section: Section | None) -> Section:
    """The section of a stage that is run: ``resolve`` has filled it in."""
    assert section is not None, "resolve fills the section of every stage"
    return section


def choose_device(recipe: Recipe) -> str:
    """The device a recipe means on this machine."""
    wanted = recipe.run.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError('run.device: "cuda" asked for, and there is no GPU here; use "cpu"')
    return wanted


def choose_compute(model: ModelSection, device: str) -> torch.dtype:
    """The type of the forward pass."""
    if model.compute == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if model.compute == "bfloat16" else torch.float32


def make_policy(recipe: Recipe, source: str, *, device: str) -> Policy:
    """The policy in ``source``, ready to train."""
    model = recipe.model
    return load_policy(
        source,
        dtype=model.dtype,
        device=device,
        seed=recipe.run.seed,
        options=model.options if source == model.name else {},
    )


def make_template(recipe: Recipe, policy: Policy) -> Template:
    """How this policy's prompts are written."""
    chat = recipe.model.chat
    if chat == "auto":
        chat = bool(policy.tokenizer.chat_template)
    return Template(
        policy.tokenizer, chat=chat, system=recipe.model.system, end_tokens=policy.end_tokens
    )


def make_parts(
    recipe: Recipe,
    policy: Policy,
    *,
    device: str,
    task: Task | None = None,
    rewards: RewardScorer | None = None,
) -> Parts:
    """The parts of a recipe; a task or rewards handed over as objects take its place."""
    task = task or (make_task(recipe.task) if recipe.task is not None else None)
    if rewards is None and (recipe.rewards or task is not None):
        rewards = RewardScorer(recipe.rewards or (task.rewards if task is not None else {}))
    if rewards is not None and task is not None:
        for prompt in (*task.prompts("train"), *task.prompts("test")):
            rewards.check_columns(prompt)
    return Parts(
        device=device,
        template=make_template(recipe, policy),
        task=task,
        scorer=rewards,
        correct_by=rewards.rewards[0].name if rewards is not None else "",
    )


def render_prompts(
    prompts: Sequence[Prompt], template: Template, *, policy: Policy, max_new_tokens: int
) -> tuple[list[Prompt], int]:
    """The prompts with their tokens, without those that leave no room to answer, and how many.

    Their text stays as the task gave it: that is what rewards, rollouts and samples show.
    """
    limit = context_length(policy.model)
    room = None if limit is None else limit - max_new_tokens
    if room is not None and room < 1:
        raise ValueError(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {limit} tokens; lower it"
        )
    rendered: list[Prompt] = []
    for prompt in prompts:
        tokens = template.render(prompt).tokens
        if room is None or len(tokens) <= room:
            rendered.append(replace(prompt, tokens=tokens))
    if prompts and not rendered:
        raise PromptTooLong(
            f"prompts: all {len(prompts)} are longer than {room} tokens, the context of {limit} "
            f"less max_new_tokens = {max_new_tokens}; lower max_new_tokens or shorten the prompts"
        )
    return rendered, len(prompts) - len(rendered)


def make_engine(spec: Spec, policy: Policy, *, template: Template, compute: str = "auto") -> Engine:
    """The engine a recipe names, sampling from this policy's own weights in its own precision."""
    name, options = split(spec, kind="engine")
    if options.get("compute", "auto") == "auto":
        options["compute"] = compute
    spec = {"name": name, **options}
    engine: Engine = resolve(spec, ENGINES, kind="engine")(policy, template.decode)
    return engine


def make_sampling(rl: RlSection) -> Sampling:
    """How the RL stage draws tokens."""
    return Sampling(
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        top_k=rl.top_k,
        top_p=rl.top_p,
    )


def make_learner(
    recipe: Recipe,
    policy: Policy,
    *,
    section: RlSection | SftSection,
    device: str,
    total_steps: int,
) -> LocalLearner:
    """The learner of a stage: same code, same weights, its own optimiser and schedule."""
    rl = section if isinstance(section, RlSection) else None
    optimizer = adamw(
        policy.model, learning_rate=section.learning_rate, weight_decay=section.weight_decay
    )
    schedule = functools.partial(
        rate_factor,
        total=total_steps,
        warmup=section.warmup_steps,
        schedule=section.schedule,
    )
    return LocalLearner(
        policy.model,
        optimizer,
        save=functools.partial(save_policy, policy),
        schedule=schedule,
        max_gradient_norm=section.max_gradient_norm,
        micro_batch_tokens=section.micro_batch_tokens,
        temperature=rl.temperature if rl else 1.0,
        compute=choose_compute(recipe.model, device),
        reference=rl is not None and rl.kl.placement != "none",
        entropy_gradient=rl is not None and rl.entropy_coefficient > 0,
    )


def needs_token_rewards(advantage: Mapping[str, Any]) -> bool:
    """Whether an advantage gives each token its own credit, so that the score needs a place."""
    discounted = advantage["name"] == "batch_whitened" and advantage.get("gamma", 1.0) != 1.0
    return discounted or advantage["name"] in ("return_to_go", "gae")


def make_plan(rl: RlSection) -> Plan:
    """The algorithm of a resolved section, every option bound."""
    shaping: list[Stage] = []
    if rl.missing_end_penalty:
        shaping.append(functools.partial(missing_end, penalty=rl.missing_end_penalty))
    if rl.overlong_buffer:
        shaping.append(
            functools.partial(overlong, limit=rl.max_new_tokens, buffer=rl.overlong_buffer)
        )
    if needs_token_rewards(rl.advantage):
        shaping.append(score_at_last_token)
    correction = None
    if rl.correction["name"] != "none":
        correction = resolve(rl.correction, CORRECTIONS, kind="rl.correction")
    kl = rl.kl
    coefficient = Coefficient(value=0.0)
    if kl.placement != "none":
        coefficient = Coefficient(value=kl.coefficient, rule=kl.rule, target=kl.target)
    return Plan(
        advantage=resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"),
        loss=resolve(rl.loss, POLICY_LOSSES, kind="rl.loss"),
        weights=resolve(rl.weights, WEIGHTS, kind="rl.weights"),
        shaping=tuple(shaping),
        correction=correction,
        kl_placement=kl.placement,
        kl_estimator=kl.estimator or "k3",
        kl_direction=kl.direction or "reverse",
        kl=coefficient,
        refresh_every=kl.refresh_every or 0,
        entropy_coefficient=rl.entropy_coefficient,
        kl_stop=rl.kl_stop if rl.kl_stop is not None else float("inf"),
        epochs=rl.epochs,
        minibatches=rl.minibatches,
    )
