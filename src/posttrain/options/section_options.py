"""The options of the sections that stages share: ``[run]``, ``[model]`` …

Written by ``python scripts/option_types.py`` from the sections of a recipe: change those, not this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """Where the run goes and what it does."""

    device: Literal["auto", "cpu", "cuda"]
    """Where the models live; auto takes a GPU where there is one."""
    threads: int | None
    """CPU threads; another number rounds differently, so a run keeps its own."""
    gpu_memory: str | None
    """Most of the GPU's memory that the run may take."""
    trackers: Sequence[Literal["tensorboard", "wandb"] | str | Mapping[str, Any]]
    """Trackers besides the run folder itself."""
    token_numbers: int
    """Tokens of a step of [rl] whose log-probs and terms are kept to view; 0: none."""
    trace: bool
    """Write a timeline of the last steps of [rl], to open in Perfetto."""
    save_minutes: float
    """Minutes between checkpoints of a stage without save_every; 0: none by time."""
    keep_last: int
    """Newest checkpoints of a stage to keep; 0 keeps all."""
    keep_best: int
    """Checkpoints of [rl] to keep by held-out accuracy, else reward."""
    deterministic: bool
    """Only kernels that give the same bits every time (slower)."""


class ModelOptions(TypedDict, total=False):
    """The model to start from, and how its weights are kept."""

    dtype: Literal["float32", "bfloat16"]
    """Type of the weights; in bfloat16 a small update vanishes."""
    compute: Literal["auto", "float32", "bfloat16"]
    """Type of the arithmetic; auto is bfloat16 on a GPU, else dtype."""
    compile: bool | Literal["auto"]
    """Compile the layers; auto: on a GPU, where [rl] may sample two million tokens."""
    chat: bool | Literal["auto"]
    """Use the chat template; auto does where the model has one."""
    system: str
    """System message put before every chat prompt."""
    special_tokens: Literal["text", "tokens"]
    """What a special token in the data becomes: text, or the token."""
    options: Mapping[str, Any]
    """Options of loading it: the sizes of tiny, say."""


class AdapterOptions(TypedDict, total=False):
    """Low-rank adapters (LoRA): the model stays as it is, a small product beside it learns."""

    rank: int
    """Rank of the product B·A beside each weight; 0: all weights learn."""
    alpha: float
    """The product counts alpha / rank times."""
    rslora: bool
    """It counts alpha / √rank times: for high ranks."""
    quantize: Literal["none", "nf4"]
    """Keep the weights beside them in four bits: QLoRA, by bitsandbytes."""
    targets: Sequence[str]
    """Layers to adapt, by the ends of their names; none: all linear ones."""


class ClusterOptions(TypedDict, total=False):
    """Learners and engines in processes of their own, on this machine or on a Ray cluster."""

    learners: int
    """Ranks that share the learning: the model is sharded over them."""
    engines: int
    """Replicas that share the sampling; 0: the process that runs the loop samples."""
    engine: Literal["native", "vllm"] | None
    """What samples in each of them: the default of rl.engine."""
    colocate: bool
    """Put engines on the resources of the learners, who rest meanwhile."""
    address: str | None
    """Of a Ray cluster, "host:port"; "local" starts one for the run."""
    cpus_per_learner: float
    """CPUs that a learner's rank takes."""
    gpus_per_learner: float | None
    """GPUs that it takes."""
    cpus_per_engine: float
    """CPUs that a replica takes."""
    gpus_per_engine: float | None
    """GPUs that it takes."""
    deadline: float
    """Seconds another process may take over one answer; then it counts as dead."""


class GradingOptions(TypedDict, total=False):
    """Where reward functions run, and how much each may take."""

    workers: int
    """Processes that grade; 0 runs rewards inside this one, unlimited."""
    seconds: float
    """Longest that a reward may take over one completion."""
    memory_mb: int
    """Memory that a worker may take while it grades."""


class EnvironmentOptions(TypedDict, total=False):
    """Where the environment of the task runs, how much it may take, and when an episode ends."""

    workers: int
    """Processes that host episodes; 0: in this one, without limits."""
    threads: int
    """Calls at once in a worker; coroutines too."""
    seconds: float
    """Longest that the environment may take over one reply."""
    memory_mb: int
    """Memory that a worker may take for its episodes."""
    max_turns: int
    """Turns of the policy after which an episode is over; 0: any."""
    max_tokens: int
    """Tokens after the prompt, of both sides, that an episode may have; 0: any."""


class TeacherOptions(TypedDict, total=False):
    """The model that a policy is distilled from (the algorithms distill and gkd)."""

    model: str | PathLike[str]
    """A model folder, a .gguf file or a hub id, with the policy's tokenizer."""
    dtype: Literal["float32", "bfloat16"]
    """Type of its weights."""


class CurriculumOptions(TypedDict, total=False):
    """Prompts drawn by how often they are answered rightly, in place of all in turn."""

    low: float
    """Share of right answers from which a prompt teaches."""
    high: float
    """Share up to which it does."""
    outside: float
    """How often the others are drawn; 1: as often."""


class KlOptions(TypedDict, total=False):
    """The divergence from the reference model."""

    placement: Literal["none", "loss", "reward"] | None
    """Part of the loss, of the reward, or none: no reference model."""
    coefficient: float | None
    """β, how much the divergence costs."""
    estimator: Literal["k1", "k2", "k3"] | None
    """How a token's share is found."""
    direction: Literal["reverse", "forward"] | None
    """reverse: KL(π ‖ π_ref); forward: KL(π_ref ‖ π)."""
    weighted: bool | None
    """Times ρ, in the loss: the gradient is the divergence's; posttrain explain kl."""
    rule: Literal["fixed", "proportional", "doubling"] | None
    """How β follows the target."""
    target: float | None
    """Divergence of a sequence to steer to, in nats."""
    horizon: int | None
    """Sequences after which β may have changed by 20%."""
    refresh_every: int | None
    """Steps after which the reference becomes the policy; 0 keeps it frozen."""
    dtype: Literal["model", "bfloat16"] | None
    """Type of the reference's weights: the model's, or half of that."""
    offload: bool | None
    """Keep the reference in main memory while it is not asked."""


class CriticOptions(TypedDict, total=False):
    """The value model of an algorithm that has one (ppo, ppo_penalty; the advantage gae)."""

    kind: Literal["separate", "shared"]
    """A model of its own, or a head on the policy's trunk."""
    source: str | PathLike[str] | None
    """Where a separate one starts: policy, reward (the stage), or a reward model."""
    learning_rate: float | None
    """Its own step size."""
    warmup_steps: int
    """Batches on which it learns alone, at the start."""
    loss: str | Mapping[str, Any] | None
    """The value loss of a token."""
    coefficient: float
    """c_V, how much its loss counts; it matters where the trunk is shared."""


class EvalOptions(TypedDict, total=False):
    """Accuracy on the task's test problems."""

    problems: int
    """Test problems, at most."""
    samples: int
    """k of mean@k and pass@k, drawn besides the greedy answer; 0: none."""
    temperature: float | None
    """Divides the logits of the samples."""
    max_new_tokens: int | None
    """Longest completion."""
