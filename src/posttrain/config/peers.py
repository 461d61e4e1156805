"""What TRL, verl, OpenRLHF, vLLM and transformers call a key, and what it is here."""

from __future__ import annotations

from collections.abc import Collection

_BATCH = "prompts_per_step and micro_batch_tokens|batch_size and micro_batch_tokens"
_CLIP = "loss.clip_low and loss.clip_high"

# Candidates for each name of another library; the first that is a key of the section is meant.
PEERS: dict[str, str] = {
    "num_generations": "group_size",
    "n": "group_size|samples",
    "n_samples_per_prompt": "group_size|samples",
    "num_samples": "group_size|samples",
    "lr": "learning_rate",
    "actor_learning_rate": "learning_rate",
    "critic_learning_rate": "critic.learning_rate",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps",
    "max_grad_norm": "max_gradient_norm",
    "grad_clip": "max_gradient_norm",
    "gradient_checkpointing": "checkpoint_activations",
    "beta": "kl.coefficient",
    "kl_coef": "kl.coefficient",
    "init_kl_coef": "kl.coefficient",
    "kl_loss_coef": "kl.coefficient",
    "epsilon": _CLIP,
    "cliprange": _CLIP,
    "clip_range": _CLIP,
    "clip_ratio": _CLIP,
    "eps_clip": _CLIP,
    "epsilon_high": "loss.clip_high",
    "entropy_coeff": "entropy_coefficient",
    "ent_coef": "entropy_coefficient",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": "micro_batch_tokens",
    "num_train_epochs": "steps|epochs",
    "max_steps": "steps|epochs",
    "num_iterations": "epochs",
    "ppo_epochs": "epochs",
    "num_ppo_epochs": "epochs",
    "num_mini_batches": "minibatches",
    "stop_strings": "stop",
    "loss_type": "loss",
}


def ours(key: str, known: Collection[str]) -> str:
    """What a key of another library is called among the known ones; "" where it is none.

    >>> ours("max_tokens", ["steps", "max_new_tokens"]), ours("beta", ["kl"]), ours("steps", [])
    ('max_new_tokens', 'kl.coefficient', '')
    """
    for names in PEERS.get(key, "").split("|"):
        if all(name.partition(".")[0] in known for name in names.split(" and ")):
            return names
    return ""
