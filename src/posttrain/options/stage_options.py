"""The options of ``posttrain.rl``, ``sft`` and the other stages.

Written by ``python scripts/option_types.py`` from the sections of a recipe: change those, not this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from posttrain.options.section_options import (
    AdapterOptions,
    ClusterOptions,
    CriticOptions,
    CurriculumOptions,
    EnvironmentOptions,
    EvalOptions,
    GradingOptions,
    KlOptions,
    ModelOptions,
    RunOptions,
    TeacherOptions,
)


class OptimiserOptions(TypedDict, total=False):
    """What every stage that trains has."""

    learning_rate: float
    """Step size at the peak of the schedule; of adapters 10 × the default."""
    schedule: Literal["constant", "linear", "cosine"]
    """How the step size goes on from the peak."""
    warmup_steps: int
    """Optimiser steps to reach the peak."""
    weight_decay: float
    """AdamW's pull of the weights to zero."""
    adam_betas: Sequence[float]
    """AdamW's β₁ and β₂: how much its running means keep."""
    adam_moments: Literal["full", "8bit"]
    """AdamW's two means: in the weights' type, or in 8 bits (bitsandbytes)."""
    max_gradient_norm: float
    """Longer gradients are cut to this."""
    micro_batch_tokens: int | Literal["auto"]
    """Tokens per pass, never the result; auto: what fits."""
    checkpoint_activations: bool
    """Compute activations twice: less memory, slower."""
    max_skipped: int
    """Steps in a row that may be NaN; then the stage stops."""
    save_every: int | None
    """Steps between checkpoints; 0: none but at Ctrl-C."""
    run_options: RunOptions
    model_options: ModelOptions
    cluster: ClusterOptions
    adapter: AdapterOptions | int


class PreferencesOptions(OptimiserOptions, total=False):
    """What every stage that learns from preferences has."""

    columns: Mapping[str, str]
    """Columns that are not called so: { chosen = "better" }."""
    test_data: str | PathLike[str] | Iterable[Mapping[str, Any]] | None
    """The same, of held-out rows."""
    test_share: float | None
    """Share of prompts to hold out."""
    epochs: int
    """Passes over the preferences."""
    steps: int | None
    """Optimiser steps, in place of epochs."""


class SftOptions(OptimiserOptions, total=False):
    """Supervised fine-tuning on demonstrations: docs/sft.md."""

    columns: Mapping[str, str]
    """Columns that are not called so: { prompt = "question" }."""
    test_data: str | PathLike[str] | Iterable[Mapping[str, Any]] | None
    """The same, of held-out demonstrations."""
    test_share: float | None
    """Share of a file to hold out, whole prompts."""
    num_demonstrations: int | None
    """Demonstrations to use, at most."""
    train_on: Literal["assistant", "last", "all"]
    """What is learned: all turns of the assistant, its last, or every token."""
    max_length: int | None
    """Longest row in tokens: longer ones are left out, text is cut."""
    wrong_share: float
    """Share of the task's answers made wrong."""
    epochs: int
    """Passes over the demonstrations."""
    steps: int | None
    """Optimiser steps, in place of epochs."""
    batch_size: int
    """Sequences per optimiser step."""
    evaluate_every: int | None
    """Steps between looks at the held-out loss; 0 is off, and holds nothing out."""
    evaluate_demonstrations: int
    """Held-out demonstrations in each of these."""
    result: Literal["last", "best"]
    """Weights that the stage ends with: the last, or those of the best held-out loss."""
    patience: int | None
    """Evaluations in a row that are not the best yet, then it stops."""


class PreferOptions(TypedDict, total=False):
    """Preferences between completions of the policy, by an annotator made of rewards."""

    samples: int
    """Completions for each prompt."""
    ranked: bool
    """Write one ranked set per prompt instead of pairs."""
    error_rate: float
    """Share of comparisons that the annotator gets the wrong way."""
    min_gap: float
    """Scores that differ by less are a tie: too close for the annotator to call."""
    num_prompts: int | None
    """Train prompts to use, at most."""
    repeats: int
    """Times that each prompt is asked."""
    max_new_tokens: int | None
    """Longest completion."""
    temperature: float
    """Divides the logits before sampling."""
    max_invalid: float
    """Share of broken scores that stops the stage."""
    run_options: RunOptions
    model_options: ModelOptions
    cluster: ClusterOptions
    grading: GradingOptions


class RewardOptions(PreferencesOptions, total=False):
    """A reward model from preferences: Bradley–Terry for pairs, Plackett–Luce for ranked sets."""

    backbone: str | PathLike[str]
    """policy (as trained so far), or a model to put the head on."""
    margins: bool
    """Use the margins that the rows have."""
    batch_size: int
    """Pairs or ranked sets per optimiser step."""


class DpoOptions(PreferencesOptions, total=False):
    """The policy learns from preferences itself, without a reward model: DPO and its kin."""

    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"]
    """What is minimised; posttrain explain dpo, and so on."""
    beta: float | None
    """How dear it is to leave the reference; the scale of the reward."""
    label_smoothing: float | None
    """Share of pairs taken to be the wrong way round (dpo)."""
    gamma: float | None
    """Margin by which to win (simpo)."""
    desirable_weight: float | None
    """What a desirable completion counts (kto)."""
    undesirable_weight: float | None
    """What an undesirable completion counts (kto)."""
    batch_size: int
    """Pairs, ranked sets or labelled rows per optimiser step."""
    evaluate_every: int | None
    """Steps between looks at the held-out preferences; 0: only before and after."""
    evaluate_preferences: int
    """Held-out pairs, sets or rows in each of these."""


class RlOptions(OptimiserOptions, total=False):
    """Reinforcement learning: one table row of pieces, and every piece can be replaced."""

    algorithm: str
    """The row of pieces to start from; posttrain explain lists them."""
    steps: int
    """Batches of rollouts to learn from."""
    adapters: int
    """Adapters to train at once, seed after seed, each in a run folder of its own."""
    prompts_per_step: int
    """Prompts in each batch."""
    curriculum: CurriculumOptions | None
    """Draw prompts by their pass rate."""
    group_size: int | None
    """Completions for each prompt."""
    epochs: int | None
    """Passes over each batch."""
    minibatches: int
    """Optimiser steps in each pass."""
    max_new_tokens: int
    """Longest completion."""
    temperature: float
    """Divides the logits before sampling."""
    top_k: int
    """Sample from the k likeliest tokens; 0 is off."""
    top_p: float
    """Sample from the likeliest tokens of this mass; 1 is off."""
    stop: Sequence[str]
    """Strings that end a completion, in evaluations too; its text ends before them."""
    engine: str | Mapping[str, Any] | None
    """What samples the completions."""
    max_lag: int
    """Updates that the oldest token learned from is behind; 0: on-policy."""
    partial: int
    """Updates over which a completion may be sampled (partial rollouts); 1: one."""
    advantage: str | Mapping[str, Any] | None
    """How rewards become advantages."""
    loss: str | Mapping[str, Any] | None
    """The policy loss of a token."""
    weights: str | Mapping[str, Any] | None
    """How the losses of tokens are averaged."""
    kl: KlOptions | float | Literal[False, "none", "loss", "reward"] | None
    """The divergence from the reference model, or β; false: none."""
    critic: CriticOptions | None
    """The value model."""
    whiten_rewards: bool | Literal["population", "sample"]
    """Divide token rewards by their deviation in the batch (true: the population's); for
    advantages per token.
    """
    penalty_target: float | None
    """approx_kl to which the coefficient of loss penalised is steered."""
    entropy_coefficient: float
    """Bonus for staying undecided."""
    kl_stop: float | None
    """Leave a batch once approx_kl passes this."""
    correction: str | Mapping[str, Any] | None
    """Factor for the sampler and the trainer disagreeing."""
    dynamic_sampling: bool | None
    """Replace groups whose rewards are all equal by fresh ones."""
    max_resamples: int | None
    """Rounds of fresh groups per step."""
    overlong_buffer: int | None
    """Last tokens before the limit, where the reward sinks by up to 1; 0 is off."""
    missing_end_penalty: float
    """Taken off the reward of a cut completion."""
    evaluate_every: int
    """Steps between evaluations; 0 is off."""
    evaluate_problems: int | None
    """Test problems in each of these, at most."""
    check: Literal["stop", "warn", "off"]
    """Try a few rollouts and one step before the first; what fails stops the run, or is said."""
    audit: bool
    """Check the algorithm's checklist at every step, and stop where not."""
    max_invalid: float
    """Share of broken scores that stops the run, of held-out ones too."""
    grading: GradingOptions
    environment: EnvironmentOptions
    teacher: TeacherOptions
    sweep: Sequence[Mapping[str, Any]]


class EvaluateOptions(EvalOptions, total=False):
    """Accuracy on the task's test problems."""

    run_options: RunOptions
    model_options: ModelOptions
    grading: GradingOptions
    environment: EnvironmentOptions
