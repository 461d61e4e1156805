"""The sections of a recipe: every key with its type, its limits, its default and a line of help.

A key made with :func:`posttrain.config.fields.later` has a default that depends on others: None, as
it is read, means "not given", and :mod:`posttrain.config.resolved` says which always have a value
once it is resolved.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from posttrain.algorithms.choices import Direction, Estimator, Placement, Rule
from posttrain.config.data_stages import (
    Optimiser,
    RewardSection,
    SftSection,
    WrittenDpo,
    WrittenPrefer,
)
from posttrain.config.fields import (
    AS_ADAPTER,
    AS_KL,
    STAGES,
    AdapterSection,
    Expected,
    OptionalPiece,
    OptionalStages,
    Rewards,
    Schedule,
    Section,
    Stage,
    StopStrings,
    SweepRows,
    Trackers,
    key,
    later,
    rate,
    schedule,
)


class WrittenRun(Section):
    """Where the run goes and what it does."""

    folder: str = later("runs/ and the recipe's name", "Folder of the run.", min_length=1)
    seed: int = key(0, "Decides every random number of the run.", ge=0, lt=2**32)
    stages: OptionalStages = later(
        "the sections there are: sft, prefer, reward, dpo, rl, eval",
        "Stages to run, in this order.",
        min_length=1,
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "Where the models live; auto takes a GPU where there is one."
    )
    threads: int | None = later(
        "torch's own, or fewer if a trial at the start is faster; 4 beside a GPU",
        "CPU threads; another number rounds differently, so a run keeps its own.",
        ge=1,
    )
    gpu_memory: Annotated[
        Annotated[str, Field(pattern=r"(?i)^\d+(\.\d+)?\s*[GM](i?B)?$")] | None,
        Expected('an amount like "8GB"'),
    ] = later("all of it", "Most of the GPU's memory that the run may take.")
    trackers: Trackers = key((), "Trackers besides the run folder itself.")
    token_numbers: int = key(
        200_000,
        "Tokens of a step of [rl] whose log-probs and terms are kept to view; 0: none.",
        ge=0,
    )
    trace: bool = key(False, "Write a timeline of the last steps of [rl], to open in Perfetto.")
    save_minutes: float = key(
        10.0, "Minutes between checkpoints of a stage without save_every; 0: none by time.", ge=0
    )
    keep_last: int = key(2, "Newest checkpoints of a stage to keep; 0 keeps all.", ge=0)
    keep_best: int = key(0, "Checkpoints of [rl] to keep by held-out accuracy, else reward.", ge=0)
    deterministic: bool = key(False, "Only kernels that give the same bits every time (slower).")


class ModelSection(Section):
    """The model to start from, and how its weights are kept."""

    name: str = key("tiny", "tiny, a model folder, a .gguf file, or a hub id.", min_length=1)
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "Type of the weights; in bfloat16 a small update vanishes."
    )
    compute: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Type of the arithmetic; auto is bfloat16 on a GPU, else dtype."
    )
    compile: Annotated[bool | Literal["auto"], Expected('true, false or "auto"')] = key(
        "auto", "Compile the layers; auto: on a GPU, where [rl] may sample two million tokens."
    )
    chat: Annotated[bool | Literal["auto"], Expected('true, false or "auto"')] = key(
        "auto", "Use the chat template; auto does where the model has one."
    )
    system: str = key("", "System message put before every chat prompt.")
    special_tokens: Literal["text", "tokens"] = key(
        "text", "What a special token in the data becomes: text, or the token."
    )
    options: dict[str, Any] = key({}, "Options of loading it: the sizes of tiny, say.")


class GradingSection(Section):
    """Where reward functions run, and how much each may take."""

    workers: int = key(2, "Processes that grade; 0 runs rewards inside this one, unlimited.", ge=0)
    seconds: float = key(10.0, "Longest that a reward may take over one completion.", gt=0)
    memory_mb: int = key(2048, "Memory that a worker may take while it grades.", ge=1)


class EnvironmentSection(Section):
    """Where the environment of the task runs, how much it may take, and when an episode ends."""

    workers: int = key(2, "Processes that host episodes; 0: in this one, without limits.", ge=0)
    threads: int = key(16, "Calls at once in a worker; coroutines too.", ge=1)
    seconds: float = key(30.0, "Longest that the environment may take over one reply.", gt=0)
    memory_mb: int = key(2048, "Memory that a worker may take for its episodes.", ge=1)
    max_turns: int = key(32, "Turns of the policy after which an episode is over; 0: any.", ge=0)
    max_tokens: int = key(
        0, "Tokens after the prompt, of both sides, that an episode may have; 0: any.", ge=0
    )


class ClusterSection(Section):
    """Learners and engines in processes of their own, on this machine or on a Ray cluster."""

    learners: int = key(1, "Ranks that share the learning: the model is sharded over them.", ge=1)
    engines: int = key(
        0, "Replicas that share the sampling; 0: the process that runs the loop samples.", ge=0
    )
    engine: Literal["native", "vllm"] | None = later(
        "as rl.engine says", "What samples in each of them: the default of rl.engine."
    )
    colocate: bool = key(False, "Put engines on the resources of the learners, who rest meanwhile.")
    address: str | None = later(
        "none: this process, or torchrun's ranks",
        'Of a Ray cluster, "host:port"; "local" starts one for the run.',
        min_length=1,
    )
    cpus_per_learner: float = key(1.0, "CPUs that a learner's rank takes.", gt=0)
    gpus_per_learner: float | None = later(
        "1 where the cluster has GPUs and run.device is not cpu", "GPUs that it takes.", ge=0
    )
    cpus_per_engine: float = key(1.0, "CPUs that a replica takes.", gt=0)
    gpus_per_engine: float | None = later(
        "1 where the cluster has GPUs and run.device is not cpu", "GPUs that it takes.", ge=0
    )
    deadline: float = key(
        600.0, "Seconds another process may take over one answer; then it counts as dead.", gt=0
    )


class TeacherSection(Section):
    """The model that a policy is distilled from (the algorithms distill and gkd)."""

    model: str = key("", "A model folder, a .gguf file or a hub id, with the policy's tokenizer.")
    dtype: Literal["float32", "bfloat16"] = key("float32", "Type of its weights.")


class WrittenKl(Section):
    """The divergence from the reference model."""

    placement: Placement | None = later(
        "the algorithm's", "Part of the loss, of the reward, or none: no reference model."
    )
    coefficient: float | None = later("the algorithm's", "β, how much the divergence costs.", ge=0)
    estimator: Estimator | None = later(
        "the algorithm's; else k3 in the loss, k1 in the reward", "How a token's share is found."
    )
    direction: Direction | None = later(
        "reverse", "reverse: KL(π ‖ π_ref); forward: KL(π_ref ‖ π)."
    )
    weighted: bool | None = later(
        "false", "Times ρ, in the loss: the gradient is the divergence's; posttrain explain kl."
    )
    rule: Rule | None = later("the algorithm's", "How β follows the target.")
    target: float | None = later(
        "the algorithm's", "Divergence of a sequence to steer to, in nats.", gt=0
    )
    horizon: int | None = later(
        "10000 with rule proportional", "Sequences after which β may have changed by 20%.", ge=1
    )
    refresh_every: int | None = later(
        "0", "Steps after which the reference becomes the policy; 0 keeps it frozen.", ge=0
    )
    dtype: Literal["model", "bfloat16"] | None = later(
        "model", "Type of the reference's weights: the model's, or half of that."
    )
    offload: bool | None = later(
        "false", "Keep the reference in main memory while it is not asked."
    )


class WrittenCritic(Section):
    """The value model of an algorithm that has one (ppo, ppo_penalty; the advantage gae)."""

    kind: Literal["separate", "shared"] = key(
        "separate", "A model of its own, or a head on the policy's trunk."
    )
    source: str | None = later(
        "policy",
        "Where a separate one starts: policy, reward (the stage), or a reward model.",
        min_length=1,
    )
    learning_rate: float | None = later("10 × rl.learning_rate", "Its own step size.", gt=0)
    warmup_steps: int = key(0, "Batches on which it learns alone, at the start.", ge=0)
    loss: OptionalPiece = later("the algorithm's", "The value loss of a token.")
    coefficient: float = key(
        1.0, "c_V, how much its loss counts; it matters where the trunk is shared.", gt=0
    )


class CurriculumSection(Section):
    """Prompts drawn by how often they are answered rightly, in place of all in turn."""

    low: float = key(0.0, "Share of right answers from which a prompt teaches.", ge=0, lt=1)
    high: float = key(0.95, "Share up to which it does.", gt=0, le=1)
    outside: float = key(0.2, "How often the others are drawn; 1: as often.", gt=0, le=1)


class WrittenRl(Optimiser):
    """Reinforcement learning: one table row of pieces, and every piece can be replaced."""

    algorithm: Annotated[str, Expected("a name of the table")] = key(
        "grpo", "The row of pieces to start from; posttrain explain lists them."
    )
    steps: int = key(100, "Batches of rollouts to learn from.", ge=1)
    adapters: int = key(
        1, "Adapters to train at once, seed after seed, each in a run folder of its own.", ge=1
    )
    prompts_per_step: int = key(16, "Prompts in each batch.", ge=1)
    curriculum: CurriculumSection | None = later("off", "Draw prompts by their pass rate.")
    group_size: int | None = later("the algorithm's", "Completions for each prompt.", ge=1)
    epochs: int | None = later("the algorithm's", "Passes over each batch.", ge=1)
    minibatches: int = key(1, "Optimiser steps in each pass.", ge=1)
    learning_rate: float = rate(1e-6)
    schedule: Schedule = schedule("constant")
    max_new_tokens: int = key(256, "Longest completion.", ge=1)
    temperature: float = key(1.0, "Divides the logits before sampling.", ge=0)
    top_k: int = key(0, "Sample from the k likeliest tokens; 0 is off.", ge=0)
    top_p: float = key(1.0, "Sample from the likeliest tokens of this mass; 1 is off.", gt=0, le=1)
    stop: StopStrings = key(
        (), "Strings that end a completion, in evaluations too; its text ends before them."
    )
    engine: OptionalPiece = later("cluster.engine, else native", "What samples the completions.")
    max_lag: int = key(
        0, "Updates that the oldest token learned from is behind; 0: on-policy.", ge=0
    )
    partial: int = key(
        1, "Updates over which a completion may be sampled (partial rollouts); 1: one.", ge=1
    )
    advantage: OptionalPiece = later("the algorithm's", "How rewards become advantages.")
    loss: OptionalPiece = later("the algorithm's", "The policy loss of a token.")
    weights: OptionalPiece = later("the algorithm's", "How the losses of tokens are averaged.")
    kl: Annotated[
        WrittenKl | None, AS_KL, Expected('a table, a number, false, "loss" or "reward"')
    ] = later("the algorithm's", "The divergence from the reference model, or β; false: none.")
    critic: WrittenCritic | None = later("the algorithm's", "The value model.")
    whiten_rewards: Annotated[
        bool | Literal["population", "sample"], Expected('true, false, "population" or "sample"')
    ] = key(
        False,
        "Divide token rewards by their deviation in the batch (true: the population's); for "
        "advantages per token.",
    )
    penalty_target: float | None = later(
        "the algorithm's", "approx_kl to which the coefficient of loss penalised is steered.", gt=0
    )
    entropy_coefficient: float = key(0.0, "Bonus for staying undecided.", ge=0)
    kl_stop: float | None = later("off", "Leave a batch once approx_kl passes this.", gt=0)
    correction: OptionalPiece = later(
        "truncated with max_lag, or where top_k or top_p cut; else none",
        "Factor for the sampler and the trainer disagreeing.",
    )
    dynamic_sampling: bool | None = later(
        "the algorithm's", "Replace groups whose rewards are all equal by fresh ones."
    )
    max_resamples: int | None = later(
        "8 with dynamic_sampling", "Rounds of fresh groups per step.", ge=1
    )
    overlong_buffer: int | None = later(
        "max_new_tokens // 4 where the algorithm has one, else 0",
        "Last tokens before the limit, where the reward sinks by up to 1; 0 is off.",
        ge=0,
    )
    missing_end_penalty: float = key(0.0, "Taken off the reward of a cut completion.", ge=0)
    evaluate_every: int = key(0, "Steps between evaluations; 0 is off.", ge=0)
    evaluate_problems: int | None = later(
        "100 with evaluate_every", "Test problems in each of these, at most.", ge=0
    )
    check: Literal["stop", "warn", "off"] = key(
        "stop",
        "Try a few rollouts and one step before the first; what fails stops the run, or is said.",
    )
    audit: bool = key(False, "Check the algorithm's checklist at every step, and stop where not.")
    max_invalid: float = key(
        0.1, "Share of broken scores that stops the run, of held-out ones too.", ge=0, le=1
    )


class WrittenEval(Section):
    """Accuracy on the task's test problems."""

    problems: int = key(200, "Test problems, at most.", ge=1)
    samples: int = key(0, "k of mean@k and pass@k, drawn besides the greedy answer; 0: none.", ge=0)
    temperature: float | None = later(
        "1.0 with samples", "Divides the logits of the samples.", gt=0
    )
    max_new_tokens: int | None = later("that of [rl], else 256", "Longest completion.", ge=1)


class Recipe(Section):
    """A whole recipe as it is written: what a TOML file says, checked key by key."""

    run: WrittenRun = key(WrittenRun(), "The run.")
    model: ModelSection = key(ModelSection(), "The model.")
    adapter: Annotated[AdapterSection, AS_ADAPTER, Expected("a table, a rank, true or false")] = (
        key(AdapterSection(), "Low-rank adapters, by their rank; true: 16.")
    )
    task: OptionalPiece = later("none", "The task: its name, and its own options beside it.")
    rewards: Rewards = key({}, "Rewards by name: a weight, or a table with weight and options.")
    grading: GradingSection = key(GradingSection(), "How rewards are run.")
    environment: EnvironmentSection = key(EnvironmentSection(), "How task.env is run.")
    cluster: ClusterSection | None = key(None, "Other processes that learn and sample.")
    sft: SftSection | None = key(None, "Supervised fine-tuning.")
    prefer: WrittenPrefer | None = key(None, "Preferences from the policy.")
    reward: RewardSection | None = key(None, "A reward model.")
    dpo: WrittenDpo | None = key(None, "Preferences, learned by the policy itself.")
    teacher: TeacherSection | None = key(None, "A teacher of the policy.")
    rl: WrittenRl | None = key(None, "Reinforcement learning.")
    eval: WrittenEval | None = key(None, "Evaluation.")
    sweep: SweepRows = key((), "Adapters to train at once: what each row changes in the recipe.")

    _source: str = PrivateAttr("")
    _notes: tuple[str, ...] = PrivateAttr(())
    _overrides: tuple[str, ...] = PrivateAttr(())
    _file: Recipe | None = PrivateAttr(None)

    @property
    def source(self) -> str:
        """The file it was read from, for messages; empty where there is none."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes from reading it, for example about files that exist in two folders."""
        return self._notes

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages to run: those named, else the sections there are."""
        return self.run.stages or tuple(name for name in STAGES if getattr(self, name) is not None)
