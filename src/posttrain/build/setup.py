"""From a resolved recipe to the parts that run it: each is made here and nowhere else."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.build.answer_check import with_check
from posttrain.build.scoring import close, in_workers, make_scorer
from posttrain.config import (
    ModelSection,
    Recipe,
    Resolved,
    RlSection,
)
from posttrain.config.pieces import MODEL_REWARD
from posttrain.data.template import PromptTooLong, Template
from posttrain.envs import make_env
from posttrain.models.cache import context_length
from posttrain.models.load import Policy, load_policy
from posttrain.protocols import Engine, Env, Scorer, Split, Task
from posttrain.registry import Spec, look_up, options, resolve, split
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines import ENGINES
from posttrain.tasks import make_task
from posttrain.track.progress import phase
from posttrain.types import Prompt, Sampling
from posttrain.types.marks import Marks

SHORTEST = 50  # prompts that are tried for room, by their text
WORTH_COMPILING = 2_000_000  # tokens to sample: 14 µs saved on each (135M weights, H200) pay 20 s


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every stage shares; ``marks`` says what its rewards mean."""

    device: str
    template: Template
    task: Task | None = None
    scorer: Scorer | None = None
    env: Env | None = None
    marks: Marks = field(default_factory=Marks)

    @property
    def correct_by(self) -> str:
        """The reward that decides what is right; empty where none does."""
        return self.marks.check

    def close(self) -> None:
        """End what runs beside this process."""
        close(self.scorer)


def choose_device(recipe: Recipe) -> str:
    """The device a recipe means on this machine."""
    wanted = recipe.run.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError('run.device: "cuda" asked for, and there is no GPU here; use "cpu"')
    return wanted


def hardware(device: str) -> str:
    """A device in words, as whoever reads a result wants to know it.

    >>> hardware("cpu")  # doctest: +ELLIPSIS
    'a CPU (...), ... thread...'
    """
    if device.startswith("cuda"):
        return f"one {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"a CPU ({platform.machine()}), {threads} thread{'s' if threads > 1 else ''}"


def choose_compute(model: ModelSection, device: str) -> torch.dtype:
    """The type of the forward pass."""
    if model.compute == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if model.compute == "bfloat16" else torch.float32


def choose_compile(recipe: Recipe, device: str) -> bool:
    """Whether layers are compiled: 20 s at the start, then sampling is 1.7 times as fast (H200)."""
    if recipe.model.compile != "auto":
        return recipe.model.compile
    if not isinstance(recipe, Resolved) or "rl" not in recipe.stages or "cuda" not in device:
        return False
    rl = recipe.rl
    num_tokens = rl.steps * rl.prompts_per_step * rl.group_size * rl.max_new_tokens
    return num_tokens >= WORTH_COMPILING


def make_policy(recipe: Recipe, source: str, *, device: str) -> Policy:
    """The policy in ``source``, ready to train; a stage's own computes as it did in that stage."""
    model, chosen = recipe.model, recipe.model.options
    if source != model.name:
        chosen = {name: value for name, value in chosen.items() if name == "attention"}
    with phase(f"loading the model {source}{_size(source)}"):
        return load_policy(
            source,
            dtype=model.dtype,
            device=device,
            seed=recipe.run.seed,
            options=chosen,
        )


def _size(source: str) -> str:
    """How large the weights of a folder or a file are: " (0.3 GB)", or nothing where unknown."""
    path = Path(source)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    total = sum(file.stat().st_size for file in files)
    return f" ({total / 1e9:.1f} GB)" if total >= 5e7 else ""


def make_template(recipe: Recipe, policy: Policy) -> Template:
    """How this policy's prompts are written."""
    chat = recipe.model.chat
    if chat == "auto":
        chat = bool(policy.tokenizer.chat_template)
    return Template(
        policy.tokenizer,
        chat=chat,
        system=recipe.model.system,
        end_tokens=policy.end_tokens,
        special_tokens=recipe.model.special_tokens,
    )


@phase("reading the data")
def make_parts(
    recipe: Recipe,
    policy: Policy,
    *,
    device: str,
    task: Task | None = None,
    rewards: RewardScorer | None = None,
    reward_model: Path | None = None,
) -> Parts:
    """The parts of a recipe; a task or rewards handed over as objects take its place.

    ``reward_model`` is where the stage reward of this run leaves its model.
    """
    task = task or (make_task(recipe.task) if recipe.task is not None else None)
    template = make_template(recipe, policy)
    own = dict(task.rewards) if task is not None else {}
    specs = dict(recipe.rewards or own)
    if MODEL_REWARD in specs and not set(specs) & set(own):
        # A model's score says nothing of right or wrong: the task's own are monitored.
        specs = {**{name: monitored(given) for name, given in own.items()}, **specs}
    graded = task is not None and any(stage in ("rl", "eval") for stage in recipe.stages)
    if rewards is None and (specs or graded):
        rewards = make_scorer(specs, template, device=device, own=reward_model)
    marks = Marks()
    if rewards is not None:
        accuracy = (recipe.task or {}).get("accuracy")
        rewards, marks = with_check(rewards, task, accuracy=accuracy)
    if rewards is not None and task is not None:
        for prompt in (*task.prompts("train"), *task.prompts("test")):
            rewards.check_columns(prompt)
    if rewards is not None:
        rewards = in_workers(rewards, recipe.grading)
    env = (recipe.task or {}).get("env")
    return Parts(
        device=device,
        template=template,
        task=task,
        scorer=rewards,
        env=None if env is None else make_env(env),
        marks=marks,
    )


def monitored(given: float | Mapping[str, Any]) -> dict[str, Any]:
    """A reward that is computed and shown, and counts for nothing."""
    return {**(given if isinstance(given, Mapping) else {}), "weight": 0.0}


def render_prompts(
    prompts: Sequence[Prompt], template: Template, *, policy: Policy, max_new_tokens: int
) -> tuple[list[Prompt], int]:
    """The prompts with their tokens, without those that leave no room to answer, and how many.

    Their text stays as the task gave it: that is what rewards, rollouts and samples show.
    """
    limit = context_length(policy.model)
    room = None if limit is None else limit - max_new_tokens
    if room is not None and room < 1:
        raise PromptTooLong(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {limit} tokens; lower it"
        )
    rendered: list[Prompt] = []
    template.prepare(prompts)
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


def check_room(recipe: Resolved, parts: Parts, *, policy: Policy) -> None:
    """Raise where a stage to come asks for completions that leave no prompt any room.

    Now, and not after the stages before it: the shortest prompts are tried, by their text.
    """
    splits: dict[str, Split] = {"prefer": "train", "rl": "train", "eval": "test"}
    for stage, asked in splits.items():
        if stage not in recipe.stages or parts.task is None:
            continue
        prompts = sorted(parts.task.prompts(asked), key=_num_characters)[:SHORTEST]
        limit = getattr(recipe, stage).max_new_tokens
        try:
            render_prompts(prompts, parts.template, policy=policy, max_new_tokens=limit)
        except PromptTooLong as error:
            context = context_length(policy.model) or limit
            even_short = (
                f"max_new_tokens: {limit} leaves no room even for the shortest {asked} prompts, "
                f"which are longer than {context - limit} tokens, the model's context of {context} "
                "less that; lower it, or shorten the prompts"
            )
            raise PromptTooLong(f"{stage}.{error if limit >= context else even_short}") from None
        except ValueError as error:
            raise ValueError(f"{stage}.{error}") from None


def _num_characters(prompt: Prompt) -> int:
    return len(prompt.text) + sum(len(message["content"]) for message in prompt.messages)


def tell_left_out(kept: int, total: int, *, option: str, rows: str, limit: int | None) -> None:
    """Raise where no row of an option fits the model's context; warn of those too long."""
    if total and not kept:
        raise ValueError(
            f"{option}: none of the {total} {rows} fits the model's context of {limit} tokens; "
            "shorten them, or take a model with a longer one"
        )
    if kept < total:
        warnings.warn(
            f"{total - kept} of {total} {rows} are longer than the model's context of {limit} "
            "tokens and are left out",
            stacklevel=3,
        )


def make_engine(
    spec: Spec | None,
    policy: Policy,
    *,
    template: Template,
    compute: str = "auto",
    compiled: bool = False,
) -> Engine:
    """The engine a recipe names, sampling from this policy's own weights in its own precision.

    ``compute`` and ``compiled`` are for the engines whose signature asks for them.
    """
    name, given = split(spec or "native", kind="engine")
    asked = options(look_up(name, ENGINES, kind="engine"))
    if "compute" in asked and given.get("compute", "auto") == "auto":
        given["compute"] = compute
    if "compiled" in asked and compiled:
        given["compiled"] = True
    spec = {"name": name, **given}
    engine: Engine = resolve(spec, ENGINES, kind="engine")(policy, template.decode)
    missing = [each for each in ("generate", "sync", "close") if not hasattr(engine, each)]
    if missing:
        raise ValueError(
            f"engine {name!r}: a {type(engine).__name__} has no {' and no '.join(missing)}; "
            "docs/engines.md shows a whole engine"
        )
    return engine


def until_done(
    engine: Engine, *, given: Engine | None = None
) -> contextlib.AbstractContextManager[Engine]:
    """Closes an engine behind the job it was made for; a ``given`` one is its owner's to close."""
    return contextlib.nullcontext(engine) if engine is given else contextlib.closing(engine)


def make_sampling(rl: RlSection) -> Sampling:
    """How the RL stage draws tokens."""
    return Sampling(
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        top_k=rl.top_k,
        top_p=rl.top_p,
        stop=tuple(rl.stop),
    )
