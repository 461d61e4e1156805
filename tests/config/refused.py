"""What each rule refuses, word for word: the tables of test_rules.py."""

from typing import Any

Cases = list[tuple[dict[str, Any], str]]

COMPARES_NONE = (
    "rl.advantage to one that compares none: return, constant_baseline, moving_baseline, "
    "greedy_baseline, batch_whitened, return_to_go, turn_return_to_go, gae or towards_teacher"
)
GROUP_OF_ONE = (
    "rl.group_size: 1, but advantage {!r} compares the completions of a prompt, 2 at least; "
    "set rl.group_size to 2 or more, or " + COMPARES_NONE
)

# rule: (values of [rl], the message)
RL_REFUSED: dict[str, Cases] = {
    "band_of_nothing": [
        (
            {"curriculum": {"low": 0.97}},
            "rl.curriculum.low: 0.97 is not below high = 0.95; lower it",
        ),
    ],
    "uneven_minibatches": [
        (
            {"prompts_per_step": 3, "group_size": 4, "minibatches": 5},
            "rl.minibatches: 5 does not divide 3 prompts × 4 completions = 12 rollouts; 4 and 6 do",
        ),
        (
            {"prompts_per_step": 3, "group_size": 4, "minibatches": 24},
            "rl.minibatches: 24, but 3 prompts × 4 completions = 12 rollouts; set it to 12 or less",
        ),
    ],
    "greedy_sampling": [
        (
            {"temperature": 0},
            "rl.temperature: 0 is greedy: all completions of a prompt are the same and nothing "
            "can be learned; set it higher (1.0 is the model's own distribution)",
        ),
        (
            {"temperature": 1e-7},
            "rl.temperature: 1e-07 is greedy: all completions of a prompt are the same and nothing "
            "can be learned; set it higher (1.0 is the model's own distribution)",
        ),
        (
            {"engine": "native", "top_k": 1},
            "rl.top_k: 1 is greedy: all completions of a prompt are the same and nothing can be "
            "learned; set it above 1, or to 0 (off)",
        ),
    ],
    "buffer_above_limit": [
        (
            {"overlong_buffer": 33, "max_new_tokens": 32},
            "rl.overlong_buffer: 33 tokens, but completions end at rl.max_new_tokens = 32; "
            "set it to less",
        )
    ],
    "resampling_nothing": [
        (
            {"algorithm": "reinforce", "dynamic_sampling": True},
            "rl.dynamic_sampling: a group of 1 always has equal rewards, so all would be thrown "
            "away; set rl.group_size to 2 or more, or rl.dynamic_sampling to false",
        ),
    ],
    "nothing_to_evaluate": [
        (
            {"evaluate_every": 5, "evaluate_problems": 0},
            "rl.evaluate_problems: 0; set it to 1 or more, or rl.evaluate_every to 0",
        ),
    ],
    "warmup_of_the_whole_run": [
        (
            {"algorithm": "ppo", "steps": 5, "critic": {"warmup_steps": 5}},
            "rl.critic.warmup_steps: 5 of 5 steps, so the policy would never learn; "
            "set it to less than rl.steps",
        )
    ],
    "lag_of_the_whole_run": [
        (
            {"max_lag": 5, "steps": 5},
            "rl.max_lag: 5 of 5 steps, so every batch would be sampled before the policy has "
            "learned anything; set it to less than rl.steps",
        )
    ],
    "parts_of_completions": [
        (
            {"max_lag": 1, "partial": 3, "max_new_tokens": 6},
            "rl.partial: over 3 updates a completion grows 2 old, and rl.max_lag is 1; set "
            "rl.max_lag to 2, or to 3 to sample while the learner trains",
        ),
        (
            {"max_lag": 2, "partial": 3, "max_new_tokens": 16},
            "rl.partial: 3 does not divide rl.max_new_tokens, 16; set that to 15",
        ),
        (
            {"max_lag": 1, "partial": 2, "curriculum": {}},
            "rl.partial: a curriculum draws prompts by the completions before, and these are not "
            "whole yet; set rl.partial to 1, or drop rl.curriculum",
        ),
        (
            {"max_lag": 1, "partial": 2, "dynamic_sampling": True},
            "rl.partial: dynamic_sampling wants whole completions before it draws other prompts; "
            "set rl.partial to 1, or rl.dynamic_sampling to false",
        ),
    ],
    "baseline_of_gradients": [
        (
            {"advantage": "optimal_baseline"},
            "rl.advantage: 'optimal_baseline' needs the gradient norm of every sequence, which "
            "only posttrain walkthrough computes; use leave_one_out or moving_baseline",
        )
    ],
    "group_of_one": [
        ({"group_size": 1}, GROUP_OF_ONE.format("group_normalised")),
        ({"algorithm": "dr_grpo", "group_size": 1}, GROUP_OF_ONE.format("group_centred")),
        ({"algorithm": "rloo", "group_size": 1}, GROUP_OF_ONE.format("leave_one_out")),
        ({"advantage": "max_only", "group_size": 1}, GROUP_OF_ONE.format("max_only")),
        (
            {"advantage": "leave_one_out_normalised", "group_size": 1},
            GROUP_OF_ONE.format("leave_one_out_normalised"),
        ),
        (
            {"algorithm": "pkpo", "group_size": 4},
            "rl.group_size: 4, but advantage 'pass_at_k' compares the completions of a prompt, "
            "5 at least; set rl.group_size to 5 or more, or " + COMPARES_NONE,
        ),
        (
            {"algorithm": "pkpo", "advantage": {"k": 8}},
            "rl.group_size: 8, but advantage 'pass_at_k' compares the completions of a prompt, "
            "9 at least; set rl.group_size to 9 or more, or " + COMPARES_NONE,
        ),
        (
            {"algorithm": "reinforce_pp", "advantage": {"centre_groups": True}},
            GROUP_OF_ONE.format("batch_whitened"),
        ),
    ],
    "penalty_of_one_step": [
        (
            {"algorithm": "ppo_penalty", "epochs": 1},
            "rl.penalty_target: after one optimiser step per batch the policy is still the old one "
            "when it is measured, so the penalty would only shrink; set rl.epochs or "
            "rl.minibatches above 1",
        )
    ],
    "greedy_beside_parts": [
        (
            {"algorithm": "remax", "max_lag": 1, "partial": 2},
            "rl.partial: advantage 'greedy_baseline' compares with a greedy completion of the same "
            "weights, and a partial rollout has several; set rl.partial to 1",
        ),
    ],
    "engine_cannot_truncate": [
        (
            {"engine": "server", key: value},
            f"rl.{key}: engine 'server' reports log-probs of the whole distribution, not of the "
            "one truncated by top_k or top_p; switch both off (0 and 1.0), or set rl.engine to "
            '"native"',
        )
        for key, value in (("top_k", 5), ("top_p", 0.5))
    ],
}

# keys of [rl] that have no effect beside others: (values of [rl], the message)
RL_WITHOUT_EFFECT: Cases = [
    (
        {"max_resamples": 3},
        "rl.max_resamples: no effect; drop it, or set rl.dynamic_sampling to true",
    ),
    (
        {"evaluate_problems": 5},
        "rl.evaluate_problems: no effect; drop it, or set rl.evaluate_every above 0",
    ),
    (
        {"kl_stop": 0.1},
        "rl.kl_stop: no effect, because a batch is left after one optimiser step anyway; "
        "drop it, or set rl.epochs or rl.minibatches above 1",
    ),
    (
        {"whiten_rewards": True},
        "rl.whiten_rewards: not for the advantage 'group_normalised'; drop it, or set "
        "rl.advantage to gae or return_to_go or turn_group_normalised or turn_return_to_go, which "
        "give every token its own reward",
    ),
    (
        {"algorithm": "ppo", "advantage": "return", "whiten_rewards": True},
        "rl.whiten_rewards: not for the advantage 'return'; drop it, or set "
        "rl.advantage to gae or return_to_go or turn_group_normalised or turn_return_to_go, which "
        "give every token its own reward",
    ),
    (
        {"critic": {}},
        "rl.critic: no effect, because the advantage 'group_normalised' asks for no values; "
        "drop it, or set rl.advantage to gae (the algorithm ppo does)",
    ),
    (
        {"advantage": "posttrain.algorithms.advantages:group_centred", "critic": {}},
        "rl.critic: no effect, because the advantage 'posttrain.algorithms.advantages:"
        "group_centred' asks for no values; drop it, or set rl.advantage to gae (the algorithm "
        "ppo does); if it reads values, declare it above the function: "
        '@piece(needs={"values"})',
    ),
]

ONE_BASE = {"name": "some/model"}
SEVERAL: dict[str, Any] = {"adapter": {"rank": 8}, "model": ONE_BASE}

# rule: (values of the recipe, the message)
RECIPE_REFUSED: dict[str, Cases] = {
    "decay_of_everything": [
        (
            {"rl": {"weight_decay": 500, "learning_rate": 0.01}},
            "rl.weight_decay: 500 × rl.learning_rate = 0.01 takes 5 of every weight off at each "
            "step; set it below 100 (0.01 and 0.1 are usual)",
        )
    ],
    "repeated_names": [
        (
            {"run": {"stages": ["rl", "eval", "rl"]}},
            "run.stages: 'rl' is listed twice; name each once",
        ),
        (
            {"run": {"trackers": ["wandb", {"name": "wandb", "mode": "offline"}]}, "rl": {}},
            "run.trackers: 'wandb' is listed twice; name each once",
        ),
    ],
    "compute_above_weights": [
        (
            {"model": {"dtype": "bfloat16", "compute": "float32"}, "rl": {}},
            'model.compute: float32 needs model.dtype = "float32" (the default)',
        )
    ],
    "task_missing": [
        (
            {"task": None, "sft": {}, "rl": {}, "eval": {}},
            "task: missing, but required by sft and rl and eval: "
            'write [task] with name = "..."; from Python, give prompts=… or task=…',
        ),
        (
            {"task": None, "sft": {}},
            'task: missing, but required by sft: write [task] with name = "..."; from '
            "Python, give prompts=… or task=…",
        ),
        (
            {"task": None, "prefer": {}, "reward": {}},
            'task: missing, but required by prefer: write [task] with name = "..."; from '
            "Python, give prompts=… or task=…",
        ),
    ],
    "engines_nowhere": [
        (
            {"rl": {}, "cluster": {"engines": 2}},
            "cluster.engines: engines are processes of a Ray cluster; set cluster.address "
            '("local" starts one for the run), or drop them',
        )
    ],
    "environment_nowhere": [
        (
            {"environment": {"workers": 4}, "rl": {}},
            "environment.workers: no environment is named; set task.env, or drop it",
        ),
        (
            {
                "task": {"name": "sums", "env": "scripted"},
                "environment": {"max_tokens": 8},
                "rl": {"max_new_tokens": 9},
            },
            "environment.max_tokens: 8 leaves no room for one turn of rl.max_new_tokens = 9; "
            "raise it, or set 0",
        ),
    ],
    "environment_beside_parts": [
        (
            {
                "task": {"name": "sums", "env": "scripted"},
                "rl": {"max_lag": 1, "partial": 2},
            },
            "rl.partial: completions that an environment replies to are sampled by one version of "
            "the weights; set rl.partial to 1",
        ),
    ],
    "engines_differ": [
        (
            {
                "rl": {"engine": "server"},
                "cluster": {"address": "local", "engines": 1, "engine": "vllm"},
                **stages,
            },
            "cluster.engine: 'vllm', and rl.engine is 'server'; drop one of them",
        )
        for stages in ({}, {"run": {"stages": ["eval"]}})
    ],
    "rewards_without_weight": [
        (
            {"rewards": {"numeric": 0}, "rl": {}},
            "rewards: every weight is 0, so nothing can be learned; give one another weight",
        )
    ],
    "best_without_measure": [
        (
            {"run": {"keep_best": 1}, "rl": {"save_every": 3, "evaluate_every": 2}},
            "run.keep_best: what a checkpoint is worth is measured at its own step, and rl saves "
            "every 3 and evaluates every 2 (0 is off); set rl.save_every to a multiple of "
            "rl.evaluate_every, or run.keep_best to 0",
        ),
        (
            {"run": {"keep_best": 1}, "rl": {"evaluate_every": 2}},
            "run.keep_best: what a checkpoint is worth is measured at its own step, and rl saves "
            "by time and evaluates every 2 (0 is off); set rl.save_every to a multiple of "
            "rl.evaluate_every, or run.keep_best to 0",
        ),
    ],
    "quantized_in_vllm": [],  # test_adapter_runs.py has it: the engines here are others
    "several_adapters": [
        (
            {"rl": {"adapters": 2}, "model": ONE_BASE},
            "rl.adapters: several policies share one base only as adapters; set adapter.rank",
        ),
        (
            {"sweep": [{"rl": {"steps": 2}}], "rl": {}},
            "sweep: several policies share one base only as adapters; set adapter.rank",
        ),
        (
            {"rl": {"adapters": 2, "max_lag": 1}, "adapter": {"rank": 8}, "model": ONE_BASE},
            "rl.adapters: adapters wait for each other at every step; set rl.max_lag to 0",
        ),
        (
            {"rl": {"adapters": 2}, "sft": {}, **SEVERAL},
            "rl.adapters: sft would be done by each adapter for itself; run it first, and give "
            "its run as model.name",
        ),
        (
            {"rl": {"adapters": 2}, "cluster": {}, **SEVERAL},
            "rl.adapters: adapters of one batch learn in one process; drop [cluster]",
        ),
        (
            {"sweep": [{"rl": {"steps": 2}}], "eval": {}},
            "sweep: its rows are for the stage rl; add [rl], or drop it",
        ),
    ],
    "sweep_rows": [
        (
            {"sweep": [{"rl": {"steps": 2}}, {key: change}], "rl": {}, **SEVERAL},
            f"sweep: row 1 changes {key}.{next(iter(change))}, which the adapters of a run share; "
            "rows may change run.seed, adapter.alpha, rl, rewards",
        )
        for key, change in {
            "adapter": {"rank": 4},
            "model": {"dtype": "bfloat16"},
            "rl": {"max_lag": 1},
        }.items()
    ]
    + [
        (
            {"sweep": [{"run": True}], "rl": {}, "adapter": {"rank": 8}},
            "sweep: row 0 changes run, which the adapters of a run share; rows may change "
            "run.seed, adapter.alpha, rl, rewards",
        )
    ],
    "bases_of_seeds": [
        (
            {"rl": {"adapters": 2}, "adapter": {"rank": 8}},
            "model.name: tiny draws its weights by run.seed, so every seed would have another "
            "base; set model.options.seed, or train a model first",
        ),
        (
            {"sweep": [{"run": {"seed": 2}}, {}], "rl": {}, "adapter": {"rank": 8}},
            "model.name: tiny draws its weights by run.seed, so every seed would have another "
            "base; set model.options.seed, or train a model first",
        ),
    ],
    "columns_unknown": [
        (
            {"sft": {"columns": {"promt": "question"}}},
            "sft.columns: demonstrations have no 'promt'; did you mean 'prompt'? Known: "
            "completion, messages, prompt, text",
        ),
    ],
}

TEACHER_MISSING = (
    "teacher.model: missing, but required by {}: write [teacher] with "
    'model = "FOLDER", a model with the policy\'s tokenizer'
)

# rule: (values of the recipe, the message)
TEACHER_REFUSED: dict[str, Cases] = {
    "teacher_missing": [
        (
            {"rl": {"algorithm": "distill"}},
            TEACHER_MISSING.format("rl.advantage = 'towards_teacher'"),
        ),
        (
            {"teacher": {"dtype": "bfloat16"}, "rl": {"algorithm": "gkd"}},
            TEACHER_MISSING.format("rl.loss = 'teacher_divergence'"),
        ),
        (
            {"rl": {"advantage": "towards_teacher", "loss": "teacher_divergence"}},
            TEACHER_MISSING.format(
                "rl.advantage = 'towards_teacher' and rl.loss = 'teacher_divergence'"
            ),
        ),
    ],
    "divergence_over_ranks": [
        (
            {
                "teacher": {"model": "larger"},
                "rl": {"algorithm": "gkd"},
                "cluster": {"learners": 2},
            },
            "rl.loss: 'teacher_divergence' compares whole distributions, which takes both models "
            "whole, and cluster.learners = 2 shards them; set it to 1, or rl.algorithm to distill, "
            "whose teacher may be sharded",
        )
    ],
}
TEACHER_WITHOUT_EFFECT: Cases = [
    (
        {"teacher": {"model": "larger", "dtype": "bfloat16"}, "rl": {}},
        "teacher.model, teacher.dtype: no effect, because no piece of rl asks a teacher; drop "
        "them, or set rl.algorithm to distill or gkd",
    ),
]

MODEL_MISSING = (
    'rewards.model.path: "reward" is the stage of this run, and it does not run before {}; name '
    "the folder of a reward model, or add [reward]"
)
OWN_JUDGE = (
    "prefer.rewards.model.path: the stage reward learns from these preferences, so it cannot judge "
    "them; name the folder of another reward model"
)
PREFER_MISSING = (
    'reward.data: "prefer", but no stage prefer runs before; add [prefer], or give a file: '
    "--reward.data pairs.jsonl"
)
SOURCE_MISSING = (
    'rl.critic.source: "reward" is the stage of this run, and it does not run before rl; name the '
    'folder of a reward model, or use "policy"'
)
FROM_REWARD = {"algorithm": "ppo", "critic": {"source": "reward"}}
MODEL_FIRST: dict[str, Any] = {"prefer": {}, "reward": {}, "rewards": {"model": 1}}

# rule: (values of the recipe, the message), in a folder that holds pairs.jsonl alone
PREFERENCE_REFUSED: dict[str, Cases] = {
    "preferences_missing": [
        ({"reward": {}}, PREFER_MISSING),
        ({"run": {"stages": ["reward", "prefer"]}}, PREFER_MISSING),
        (
            {"reward": {"data": "pair.jsonl"}},
            "reward.data: no file 'pair.jsonl' (seen from {folder}) and not \"prefer\"; "
            "did you mean 'pairs.jsonl'? Known: pairs.jsonl, prefer",
        ),
        (
            {"reward": {"data": "preferences"}},
            "reward.data: no file 'preferences' (seen from {folder}) and not \"prefer\"; "
            "did you mean 'prefer'? Known: pairs.jsonl, prefer",
        ),
        (
            {"reward": {"data": "pairs.jsonl", "test_data": "pair.jsonl"}},
            "reward.test_data: no file 'pair.jsonl' (seen from {folder}); "
            "did you mean 'pairs.jsonl'? Known: pairs.jsonl",
        ),
        (
            {"reward": {"data": "pairs.jsonl", "test_data": "none/test.jsonl"}},
            "reward.test_data: no file 'none/test.jsonl' (seen from {folder}); "
            "no data in none either",
        ),
        ({"dpo": {}}, PREFER_MISSING.replace("reward.data", "dpo.data")),
        (
            {"dpo": {"data": "pair.jsonl"}},
            "dpo.data: no file 'pair.jsonl' (seen from {folder}) and not \"prefer\"; "
            "did you mean 'pairs.jsonl'? Known: pairs.jsonl, prefer",
        ),
    ],
    "reward_model_missing": [
        ({"rewards": {"model": 1}, "rl": {}, "eval": {}}, MODEL_MISSING.format("rl")),
        ({"rewards": {"model": {"path": "reward"}}, "eval": {}}, MODEL_MISSING.format("eval")),
        (
            {**MODEL_FIRST, "run": {"stages": ["prefer", "rl", "reward"]}},
            MODEL_MISSING.format("rl"),
        ),
        (
            {**MODEL_FIRST, "run": {"stages": ["eval", "prefer", "reward", "rl"]}},
            MODEL_MISSING.format("eval"),
        ),
    ],
    "annotator_is_the_model": [
        ({"prefer": {"rewards": {"model": 1}}}, OWN_JUDGE),
        ({"prefer": {"rewards": {"numeric": 1, "model": {"path": "reward"}}}}, OWN_JUDGE),
        (
            {"prefer": {"rewards": {"numeric": 0}}},
            "prefer.rewards: every weight is 0, so nothing is preferred; give one another weight",
        ),
    ],
    "sample_without_a_partner": [
        (
            {"prefer": {"samples": 3}},
            "prefer.samples: of 3 completions one is left without a partner; set an even number, "
            "or prefer.ranked to true",
        )
    ],
    "critic_source_missing": [
        ({"rl": FROM_REWARD}, SOURCE_MISSING),
        (
            {"rl": FROM_REWARD, "run": {"stages": ["prefer", "rl", "reward"]}},
            SOURCE_MISSING,
        ),
    ],
    "environment_without_a_part": [
        (
            {"task": {"name": "sums", "env": "scripted"}, "prefer": {}},
            "task.env: the stage prefer compares single answers and knows no replies to them; drop "
            "task.env, or [prefer]",
        ),
    ],
}

# keys that have no effect beside others: (values of the recipe, the message), in the same folder
WITHOUT_EFFECT: Cases = [
    (
        {"sft": {"steps": 5, "epochs": 2}},
        "sft.epochs: no effect beside sft.steps; drop one of them",
    ),
    (
        {"sft": {"evaluate_every": 0, "patience": 2}},
        "sft.patience: no effect with sft.evaluate_every = 0; drop it, or that",
    ),
    (
        {"dpo": {"data": "pairs.jsonl", "steps": 5, "epochs": 2}},
        "dpo.epochs: no effect beside dpo.steps; drop one of them",
    ),
    (
        {"model": {"chat": False, "system": "Be brief."}, "rl": {}},
        "model.system: no effect without a chat template; drop it, or set model.chat",
    ),
    (
        {"prefer": {}, "reward": {"test_data": "pairs.jsonl"}},
        "reward.test_data: prefer brings test pairs of its own; drop it",
    ),
    (
        {"reward": {"data": "pairs.jsonl", "test_data": "pairs.jsonl", "test_share": 0.2}},
        "reward.test_share: no effect beside reward.test_data; drop one of them",
    ),
    (
        {"prefer": {}, "dpo": {"loss": "ipo", "label_smoothing": 0.1}},
        "dpo.label_smoothing: the loss 'ipo' has none; drop it",
    ),
    ({"prefer": {}, "dpo": {"gamma": 0.5}}, "dpo.gamma: the loss 'dpo' has none; drop it"),
    (
        {"prefer": {}, "dpo": {"loss": "orpo", "desirable_weight": 2.0}},
        "dpo.desirable_weight: the loss 'orpo' has none; drop it",
    ),
    (
        {"prefer": {}, "dpo": {"loss": "simpo", "undesirable_weight": 2.0}},
        "dpo.undesirable_weight: the loss 'simpo' has none; drop it",
    ),
    (
        {"prefer": {}, "dpo": {"test_data": "pairs.jsonl"}},
        "dpo.test_data: prefer brings test pairs of its own; drop it",
    ),
    (
        {"dpo": {"data": "pairs.jsonl", "test_data": "pairs.jsonl", "test_share": 0.2}},
        "dpo.test_share: no effect beside dpo.test_data; drop one of them",
    ),
]
