"""From a resolved recipe to the parts that run it: each is made here and nowhere else."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from posttrain.build.answer_check import with_check
from posttrain.build.scoring import check_scores, close, in_workers, make_environment, make_scorer
from posttrain.config import MODEL_REWARD, ModelSection, Recipe, Resolved, of_any_model
from posttrain.data.template import Template
from posttrain.envs import is_elsewhere, make_env
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import check_targets, with_adapters
from posttrain.protocols import Engine, Env, Scorer, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.environment import Environment
from posttrain.tasks import check_told_apart, make_task
from posttrain.track.progress import phase
from posttrain.types.marks import Marks

if TYPE_CHECKING:
    from posttrain.build.cluster import Cluster
    from posttrain.build.several.members import AdapterMember

WORTH_COMPILING = 2_000_000  # tokens to sample: 14 µs saved on each (135M weights, H200) pay 20 s


class Supplied(TypedDict, total=False):
    """Parts of a run that are handed over as Python objects instead of by name."""

    task: Task
    rewards: RewardScorer
    engine: Engine
    callbacks: Sequence[Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a recipe comes to with one policy: all that its stages and its checks work with.

    ``marks`` says what its rewards mean; ``handed_rewards`` are those that were handed over.
    ``engine`` is one that was, and stays its owner's to close. ``reward_model`` is where the stage
    reward of this run leaves its model. ``cluster`` makes what learns and samples elsewhere; it is
    its owner's to close too. ``member`` is this policy's place among those of one run. ``replicas``
    is how many of a small model learn at the same time on a CPU.
    """

    recipe: Resolved
    policy: Policy
    device: str
    template: Template
    task: Task | None = None
    scorer: Scorer | None = None
    handed_rewards: RewardScorer | None = None
    env: Environment | None = None
    marks: Marks = field(default_factory=Marks)
    engine: Engine | None = None
    reward_model: Path | None = None
    cluster: Cluster | None = None
    member: AdapterMember | None = None
    replicas: int = 1

    @property
    def graded(self) -> Scorer:
        """The scorer, for a stage that cannot do without."""
        if self.task is None or self.scorer is None:
            raise ValueError("task: this stage needs a task with rewards; name one in [task]")
        return self.scorer

    def alone(self) -> AbstractContextManager[Any]:
        """Inside, no other policy of the run has its turn: weights that all share may change."""
        return nullcontext() if self.member is None else self.member.alone()

    def cluster_metrics(self) -> Mapping[str, float]:
        """What the processes of its cluster count, where there is one."""
        return {} if self.cluster is None else self.cluster.metrics()

    def close(self) -> None:
        """End what runs beside this process."""
        close(self.scorer)
        if self.env is not None:
            self.env.close()


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
    if "cuda" not in device or not isinstance(recipe, Resolved) or "rl" not in recipe.stages:
        return False
    rl = recipe.rl
    num_tokens = rl.steps * rl.prompts_per_step * rl.group_size * rl.max_new_tokens
    return num_tokens >= WORTH_COMPILING


def make_policy(recipe: Recipe, source: str, *, device: str) -> Policy:
    """The policy in ``source``, ready to train; a stage's own computes as it did in that stage."""
    check_targets(source, dict(recipe.adapter))
    return adapted(recipe, read_policy(recipe, source, device=device), device=device)


def read_policy(recipe: Recipe, source: str, *, device: str) -> Policy:
    """The policy in ``source`` as it is, with adapters only where it has some.

    The base of adapters waits in main memory, to be rounded or quantised: it may fit the device
    only then. :func:`adapted` brings it there.
    """
    model, chosen = recipe.model, recipe.model.options
    if source != model.name:
        chosen = of_any_model(chosen)
    with phase(f"loading the model {source}{_size(source)}"):
        return load_policy(
            source,
            dtype=model.dtype,
            device=device,
            seed=recipe.run.seed,
            options=chosen,
            gpu_memory=recipe.run.gpu_memory,
            moved=not recipe.adapter.rank,
        )


def adapted(recipe: Recipe, policy: Policy, *, device: str, folder: str | None = None) -> Policy:
    """The policy with the adapters of a recipe, on the device it is for.

    A base without a folder gets one in ``folder``.
    """
    found = with_adapters(
        policy,
        dict(recipe.adapter),
        seed=recipe.run.seed,
        folder=Path(folder or recipe.run.folder or "runs"),
        compute=choose_compute(recipe.model, device),
    )
    found.model.to(device)
    return found


def _size(source: str) -> str:
    """How large the weights of a folder or a file are: " (0.3 GB)", or nothing where unknown."""
    path = Path(source)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    total = sum(file.stat().st_size for file in files)
    return f" ({total / 1e9:.1f} GB)" if total >= 5e7 else ""


def make_template(recipe: Recipe, policy: Policy, *, env: Env | None = None) -> Template:
    """How this policy's prompts are written, with the tools of an environment."""
    chat = recipe.model.chat
    if chat == "auto":
        chat = bool(policy.tokenizer.chat_template)
    return Template(
        policy.tokenizer,
        chat=chat,
        system=recipe.model.system,
        end_tokens=policy.end_tokens,
        special_tokens=recipe.model.special_tokens,
        tools=getattr(env, "tools", None) or (),
    )


def make_task_env(
    recipe: Recipe, policy: Policy, *, given: Any = None, needed: bool = True
) -> Env | None:
    """The environment of ``task.env``, told how the policy's prompts and calls are written.

    ``given`` is one in its place: an environment as it is, or a class or function that becomes one.
    Where it is not ``needed``, an object of another process is done without, and that is said.
    """
    named: Any = (recipe.task or {}).get("env") if given is None else given
    if hasattr(named, "reply") and not isinstance(named, type):
        env: Env = named
        return env
    if given is not None and not callable(given):
        raise ValueError(
            f"env: expected an environment, its name, or its class or function, got {given!r}"
        )
    if named is None:
        return None
    if not needed and isinstance(named, Mapping) and is_elsewhere(named["name"]):
        warnings.warn(
            "task.env: was handed over from Python, and no folder can hold it: every answer is "
            "one turn here",
            stacklevel=3,
        )
        return None
    template = make_template(recipe, policy)
    if not template.chat:
        return make_env(named, chat=False)
    return make_env(named, chat=True, tool_format=template.tool_format)


def named_task(recipe: Recipe) -> Task | None:
    """The task that a recipe names; None where it names none, or an environment alone."""
    return make_task(recipe.task) if recipe.task is not None and "name" in recipe.task else None


@phase("reading the data")
def make_setup(
    recipe: Resolved,
    policy: Policy,
    *,
    device: str,
    task: Task | None = None,
    rewards: RewardScorer | None = None,
    env: Env | None = None,
    engine: Engine | None = None,
    reward_model: Path | None = None,
    cluster: Cluster | None = None,
    member: AdapterMember | None = None,
) -> Setup:
    """The setup of a recipe; a task, rewards or an environment that are objects take its place."""
    task = task or named_task(recipe)
    env = make_task_env(recipe, policy, given=env)
    template = make_template(recipe, policy, env=env)
    own = dict(task.rewards) if task is not None else {}
    specs = dict(recipe.rewards or own)
    if MODEL_REWARD in specs and not set(specs) & set(own):
        # A model's score says nothing of right or wrong: the task's own are monitored.
        specs = {**{name: monitored(given) for name, given in own.items()}, **specs}
    graded = task is not None and any(stage in ("rl", "eval") for stage in recipe.stages)
    handed = rewards
    if env is None:
        check_told_apart(task)
    if rewards is None and (specs or graded):
        rewards = make_scorer(specs, template, device=device, own=reward_model, env=env)
    elif rewards is not None and recipe.rewards:  # functions, and a reward model by name
        rewards = rewards.joined(make_scorer(specs, template, device=device, own=reward_model))
    marks = Marks()
    if rewards is not None:
        accuracy = (recipe.task or {}).get("accuracy")
        rewards, marks = with_check(rewards, task, accuracy=accuracy)
    parts: list[Any] = [rewards, env] if graded else [rewards]
    wanting = [part for part in parts if hasattr(part, "check_columns")]
    for prompt in (*task.prompts("train"), *task.prompts("test")) if task is not None else ():
        for part in wanting:
            part.check_columns(prompt)
    if rewards is not None:
        rewards = in_workers(rewards, recipe.grading)
    played = make_environment(recipe.environment, env, template=template, policy=policy)
    if played is not None and rewards is not None and not rewards.counts:
        check_scores(env)
        played = replace(played, alone=True)
    return Setup(
        recipe=recipe,
        policy=policy,
        device=device,
        template=template,
        task=task,
        scorer=rewards,
        handed_rewards=handed,
        env=played,
        marks=marks,
        engine=engine,
        reward_model=reward_model,
        cluster=cluster,
        member=member,
    )


def monitored(given: float | Mapping[str, Any]) -> dict[str, Any]:
    """A reward that is computed and shown, and counts for nothing."""
    return {**(given if isinstance(given, Mapping) else {}), "weight": 0.0}
