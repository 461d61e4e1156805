"""The sections of the stages that learn from data: demonstrations, preferences."""

from __future__ import annotations

from typing import Literal

from posttrain.config.fields import (
    Betas,
    Rewards,
    Schedule,
    Section,
    Tokens,
    key,
    later,
    rate,
    schedule,
)


class Optimiser(Section):
    """What every stage that trains has."""

    learning_rate: float = rate(1e-5)
    schedule: Schedule = schedule("cosine")
    warmup_steps: int = key(0, "Optimiser steps to reach the peak.", ge=0)
    weight_decay: float = key(0.0, "AdamW's pull of the weights to zero.", ge=0)
    adam_betas: Betas = key((0.9, 0.95), "AdamW's β₁ and β₂: how much its running means keep.")
    adam_moments: Literal["full", "8bit"] = key(
        "full", "AdamW's two means: in the weights' type, or in 8 bits (bitsandbytes)."
    )
    max_gradient_norm: float = key(1.0, "Longer gradients are cut to this.", gt=0)
    micro_batch_tokens: Tokens = key("auto", "Tokens per pass, never the result; auto: what fits.")
    checkpoint_activations: bool = key(False, "Compute activations twice: less memory, slower.")
    max_skipped: int = key(3, "Steps in a row that may be NaN; then the stage stops.", ge=1)
    save_every: int | None = later(
        "by time: run.save_minutes", "Steps between checkpoints; 0: none but at Ctrl-C.", ge=0
    )


class SftSection(Optimiser):
    """Supervised fine-tuning on demonstrations: docs/sft.md."""

    data: str = key(
        "task", "task (its own answers), a file, a folder or a hub id: docs/data.md.", min_length=1
    )
    columns: dict[str, str] = key({}, 'Columns that are not called so: { prompt = "question" }.')
    test_data: str | None = later(
        "the test prompts of the task, else test_share of data",
        "The same, of held-out demonstrations.",
        min_length=1,
    )
    test_share: float | None = later(
        "0.05 of a file of 40 rows or more, at most evaluate_demonstrations",
        "Share of a file to hold out, whole prompts.",
        gt=0,
        lt=1,
    )
    num_demonstrations: int | None = later("all there are", "Demonstrations to use, at most.", ge=1)
    train_on: Literal["assistant", "last", "all"] = key(
        "assistant", "What is learned: all turns of the assistant, its last, or every token."
    )
    max_length: int | None = later(
        "the model's context", "Longest row in tokens: longer ones are left out, text is cut.", ge=2
    )
    wrong_share: float = key(0.0, "Share of the task's answers made wrong.", ge=0, le=1)
    epochs: int = key(1, "Passes over the demonstrations.", ge=1)
    steps: int | None = later("those of epochs", "Optimiser steps, in place of epochs.", ge=1)
    batch_size: int = key(32, "Sequences per optimiser step.", ge=1)
    learning_rate: float = rate(2e-5)
    evaluate_every: int | None = later(
        "about ten times, and once an epoch",
        "Steps between looks at the held-out loss; 0 is off, and holds nothing out.",
        ge=0,
    )
    evaluate_demonstrations: int = key(200, "Held-out demonstrations in each of these.", ge=1)
    result: Literal["last", "best"] = key(
        "last", "Weights that the stage ends with: the last, or those of the best held-out loss."
    )
    patience: int | None = later(
        "none: all steps", "Evaluations in a row that are not the best yet, then it stops.", ge=1
    )


class WrittenPrefer(Section):
    """Preferences between completions of the policy, by an annotator made of rewards."""

    rewards: Rewards = key({}, "What the annotator judges by; by default the task's own rewards.")
    samples: int = key(2, "Completions for each prompt.", ge=2)
    ranked: bool = key(False, "Write one ranked set per prompt instead of pairs.")
    error_rate: float = key(
        0.0, "Share of comparisons that the annotator gets the wrong way.", ge=0, le=1
    )
    min_gap: float = key(
        0.0, "Scores that differ by less are a tie: too close for the annotator to call.", ge=0
    )
    num_prompts: int | None = later("all there are", "Train prompts to use, at most.", ge=1)
    repeats: int = key(1, "Times that each prompt is asked.", ge=1)
    max_new_tokens: int | None = later("that of [rl], else 256", "Longest completion.", ge=1)
    temperature: float = key(1.0, "Divides the logits before sampling.", gt=0)
    max_invalid: float = key(0.1, "Share of broken scores that stops the stage.", ge=0, le=1)


class FromPreferences(Optimiser):
    """What every stage that learns from preferences has."""

    data: str = key(
        "prefer", "prefer (the stage before), a file, a folder or a hub id.", min_length=1
    )
    columns: dict[str, str] = key({}, 'Columns that are not called so: { chosen = "better" }.')
    test_data: str | None = later(
        "the test prompts of prefer, else test_share of data",
        "The same, of held-out rows.",
        min_length=1,
    )
    test_share: float | None = later(
        "0.1 of a file without test_data", "Share of prompts to hold out.", gt=0, lt=1
    )
    epochs: int = key(1, "Passes over the preferences.", ge=1)
    steps: int | None = later("those of epochs", "Optimiser steps, in place of epochs.", ge=1)


class RewardSection(FromPreferences):
    """A reward model from preferences: Bradley–Terry for pairs, Plackett–Luce for ranked sets."""

    backbone: str = key(
        "policy", "policy (as trained so far), or a model to put the head on.", min_length=1
    )
    margins: bool = key(True, "Use the margins that the rows have.")
    batch_size: int = key(64, "Pairs or ranked sets per optimiser step.", ge=1)


# What TRL calls a loss that has another name here.
PEER_LOSSES = {"sigmoid": "dpo", "kto_pair": "kto"}


class WrittenDpo(FromPreferences):
    """The policy learns from preferences itself, without a reward model: DPO and its kin."""

    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = key(
        "dpo", "What is minimised; posttrain explain dpo, and so on."
    )
    beta: float | None = later(
        "the loss's", "How dear it is to leave the reference; the scale of the reward.", gt=0
    )
    label_smoothing: float | None = later(
        "the loss's", "Share of pairs taken to be the wrong way round (dpo).", ge=0, lt=0.5
    )
    gamma: float | None = later("the loss's", "Margin by which to win (simpo).", ge=0)
    desirable_weight: float | None = later(
        "the loss's", "What a desirable completion counts (kto).", ge=0
    )
    undesirable_weight: float | None = later(
        "the loss's", "What an undesirable completion counts (kto).", ge=0
    )
    batch_size: int = key(64, "Pairs, ranked sets or labelled rows per optimiser step.", ge=1)
    learning_rate: float = rate(1e-6)
    evaluate_every: int | None = later(
        "about ten times, and once an epoch",
        "Steps between looks at the held-out preferences; 0: only before and after.",
        ge=0,
    )
    evaluate_preferences: int = key(200, "Held-out pairs, sets or rows in each of these.", ge=1)
