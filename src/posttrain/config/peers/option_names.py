"""The option names of TRL, verl and OpenRLHF, and what they are called here: the one table.

A name without a section is a key of the section that is asked about; of alternatives, parted by
"|", the first that the section has is meant.
"""

from __future__ import annotations

from collections.abc import Collection

_BATCH = "prompts_per_step and micro_batch_tokens|batch_size and micro_batch_tokens"
_CLIP = "loss.clip_low and loss.clip_high"
_SAMPLES = "group_size|samples"
_PASSES = "steps and prompts_per_step|epochs"
_EVERYONES = {
    "lr": "learning_rate",
    "max_grad_norm": "max_gradient_norm",
    "gradient_checkpointing": "checkpoint_activations",
    "max_tokens": "max_new_tokens",
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "n": _SAMPLES,
    "num_samples": _SAMPLES,
    "clip_range": _CLIP,
    "ent_coef": "entropy_coefficient",
    "stop_strings": "stop",
    "r": "rank|adapter.rank",
    "target_modules": "targets|adapter.targets",
    "use_rslora": "rslora|adapter.rslora",
    "load_in_4bit": "quantize|adapter.quantize",
}
_TRL = {
    "num_generations": _SAMPLES,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": "micro_batch_tokens",
    "num_train_epochs": _PASSES,
    "max_steps": "steps",
    "num_iterations": "epochs",
    "num_ppo_epochs": "epochs",
    "steps_per_generation": "minibatches",
    "num_mini_batches": "minibatches",
    "max_completion_length": "max_new_tokens",
    "max_length": "max_length|max_new_tokens",
    "max_seq_length": "max_length|sft.max_length",
    "early_stopping_patience": "patience|sft.patience",
    "dataset_text_field": "columns|sft.columns",
    "response_length": "max_new_tokens",
    "beta": "beta|kl.coefficient",
    "kl_coef": "kl.coefficient",
    "init_kl_coef": "kl.coefficient",
    "epsilon": _CLIP,
    "cliprange": _CLIP,
    "epsilon_high": "loss.clip_high",
    "delta": "loss",
    "loss_type": "loss",
    "importance_sampling_level": "loss",
    "scale_rewards": "advantage",
    "entropy_coef": "entropy_coefficient",
    "warmup_ratio": "warmup_steps",
    "lr_scheduler_type": "schedule",
    "adam_beta1": "adam_betas",
    "adam_beta2": "adam_betas",
    "save_steps": "save_every",
    "eval_steps": "evaluate_every",
    "mask_truncated_completions": "missing_end_penalty",
    "missing_eos_penalty": "missing_end_penalty",
    "ref_model_sync_steps": "kl.refresh_every",
    "simpo_gamma": "gamma",
    "load_best_model_at_end": "result|run.keep_best",
    "use_vllm": "engine|rl.engine",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    "reward_model_path": "rewards.model",
    "report_to": "run.trackers",
    "output_dir": "run.folder",
    "save_total_limit": "run.keep_last",
    "bf16": "model.compute",
    "fp16": "model.compute",
    "torch_dtype": "model.dtype",
    "model_name_or_path": "model.name",
    "attn_implementation": "model.options",
    "dataset_name": "data|task.path",
    "train_dataset": "data|task.path",
    "eval_dataset": "test_data|task.test_path",
    "dataset_config": "data|task.path",
    "dataset_train_split": "data|task.path",
    "dataset_test_split": "test_data|task.test_path",
    "completion_only_loss": "train_on|sft.train_on",
    "assistant_only_loss": "train_on|sft.train_on",
    "peft_config": "adapter.rank",
    "use_peft": "adapter.rank",
    "lora": "adapter.rank",
    "lora_r": "rank|adapter.rank",
    "lora_alpha": "alpha|adapter.alpha",
    "lora_target_modules": "adapter.targets",
    "environment_factory": "task.env",
    "teacher_model_name_or_path": "teacher.model",
}
_VERL = {
    "rollout_n": _SAMPLES,
    "ppo_epochs": "epochs",
    "ppo_mini_batch_size": "minibatches",
    "ppo_micro_batch_size_per_gpu": "micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "grad_clip": "max_gradient_norm",
    "clip_ratio": _CLIP,
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "kl_loss_coef": "kl.coefficient",
    "use_kl_loss": "kl.placement",
    "kl_loss_type": "kl.estimator",
    "entropy_coeff": "entropy_coefficient",
    "adv_estimator": "algorithm",
    "loss_agg_mode": "weights",
    "max_response_length": "max_new_tokens",
    "total_epochs": _PASSES,
    "total_training_steps": "steps",
    "test_freq": "evaluate_every",
    "save_freq": "save_every",
    "val_before_train": "evaluate_every",
    "train_files": "data|task.path",
    "val_files": "test_data|task.test_path",
    "prompt_key": "task.columns",
    "n_gpus_per_node": "cluster.gpus_per_learner",
    "nnodes": "cluster.learners",
    "default_local_dir": "run.folder",
    "critic_warmup": "critic.warmup_steps",
}
_OPENRLHF = {
    "n_samples_per_prompt": _SAMPLES,
    "actor_learning_rate": "learning_rate",
    "critic_learning_rate": "critic.learning_rate",
    "rollout_batch_size": "prompts_per_step",
    "micro_train_batch_size": "micro_batch_tokens",
    "max_epochs": "epochs",
    "num_episodes": "steps",
    "generate_max_len": "max_new_tokens",
    "eps_clip": _CLIP,
    "advantage_estimator": "algorithm",
    "lambd": "advantage",
    "pretrain": "model.name",
    "reward_pretrain": "rewards.model",
    "remote_rm_url": "rewards",
    "prompt_data": "task.path",
    "input_key": "task.columns",
    "label_key": "task.columns",
    "vllm_num_engines": "cluster.engines",
    "actor_num_gpus_per_node": "cluster.learners",
    "colocate_all_models": "cluster.colocate",
    "save_path": "run.folder",
    "lora_rank": "adapter.rank",
    "use_wandb": "run.trackers",
}
LIBRARIES = {"TRL": _TRL, "verl": _VERL, "OpenRLHF": _OPENRLHF, "": _EVERYONES}
# What has no counterpart, and why that is no loss, or what to do.
WITHOUT = {
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "log_completions": "all rollouts are kept in the run folder",
    "max_prompt_length": "prompts that leave no room to answer are left out, and counted",
    "remove_unused_columns": "columns go to the rewards that ask for them",
    "shuffle_dataset": "prompts are always shuffled, by the seed",
    "dataset_num_proc": "rows are read in one process",
    "packing": "sequences are packed without seeing each other, always (docs/sft.md)",
    "packing_strategy": "sequences are packed without seeing each other, always (docs/sft.md)",
    "padding_free": "sequences are packed, always",
    "push_to_hub": "posttrain push RUN ORG/NAME does it after the run",
    "hub_model_id": "posttrain push RUN ORG/NAME does it after the run",
    "deepspeed": "models are sharded by [cluster]",
    "vllm_gpu_memory_utilization": "it is an option of rl.engine",
    "vllm_mode": "rl.engine samples where it trains; engines of their own are [cluster]'s",
    "vllm_server_host": "engines of other processes are [cluster]'s",
    "trust_remote_code": "code of a model folder is never run",
}


def ours(key: str, known: Collection[str], *, sections: Collection[str] = ()) -> str:
    """What a key of another library is called among the known ones; "" where it is none.

    Where none of these is meant, it may be a key of one of the ``sections``.

    >>> ours("max_tokens", ["steps", "max_new_tokens"]), ours("beta", ["kl"]), ours("steps", [])
    ('max_new_tokens', 'kl.coefficient', '')
    >>> ours("report_to", ["steps"], sections=["run"])
    'run.trackers'
    """
    names = next((table[key] for table in LIBRARIES.values() if key in table), "")
    for each in filter(None, names.split("|")):
        first = [name.partition(".")[0] for name in each.split(" and ")]
        if all(name in known for name in first) or all(name in sections for name in first):
            return each
    return ""


def whose(key: str) -> str:
    """A key with the libraries that call it so.

    >>> whose("num_generations"), whose("lr")
    ("TRL's num_generations", 'what others call lr')
    """
    names = [name for name, table in LIBRARIES.items() if name and key in table]
    owners = " and ".join(f"{name}'s" for name in names)
    return f"{owners} {key}" if names else f"what others call {key}"


def without(key: str) -> str:
    """Why a key of another library has no counterpart; "" where it is not known.

    >>> without("logging_steps")
    'logging_steps has no counterpart: every step is logged'
    """
    return f"{key} has no counterpart: {WITHOUT[key]}" if key in WITHOUT else ""
