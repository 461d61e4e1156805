"""Every rule that needs more than one key: what it refuses, word for word, and what it lets be."""

from pathlib import Path
from typing import Any

import pytest
from config.fakes import refuses, resolved, rl

from posttrain.config import cautions, recipe_from_dict, resolve
from posttrain.config.rl_rules import ENGINE_RULES, RL_CAUTIONS, RL_RULES
from posttrain.config.rules import EVAL_RULES, RECIPE_CAUTIONS, RECIPE_RULES, SFT_RULES

pytestmark = pytest.mark.usefixtures("fake_tables")

GROUP_OF_ONE = (
    "rl.group_size: 1, but advantage {!r} compares the completions of a prompt; "
    "set rl.group_size to 2 or more, or rl.advantage to return, moving_baseline or batch_whitened"
)

# rule: (values of [rl], the message)
RL_REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "critic_not_there_yet": [
        (
            {"algorithm": "ppo"},
            "rl.algorithm: 'ppo' needs a critic, which is not implemented yet; without one: "
            "reinforce, reinforce_baseline, rloo, reinforce_pp, grpo, dr_grpo, dapo, gspo, cispo, "
            "sapo",
        ),
        (
            {"advantage": "gae"},
            "rl.advantage: 'gae' needs a critic, which is not implemented yet; without one: "
            "return, moving_baseline or batch_whitened",
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
            {"algorithm": "reinforce_pp", "advantage": {"centre_groups": True}},
            GROUP_OF_ONE.format("batch_whitened"),
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
            "can be learned; set it above 0 (1.0 is the model's own distribution)",
        )
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
        (
            {"max_resamples": 3},
            "rl.max_resamples: no effect; drop it, or set rl.dynamic_sampling to true",
        ),
    ],
    "nothing_to_evaluate": [
        (
            {"evaluate_every": 5, "evaluate_problems": 0},
            "rl.evaluate_problems: 0; set it to 1 or more, or rl.evaluate_every to 0",
        ),
        (
            {"evaluate_problems": 5},
            "rl.evaluate_problems: no effect; drop it, or set rl.evaluate_every above 0",
        ),
    ],
    "stop_of_one_step": [
        (
            {"kl_stop": 0.1},
            "rl.kl_stop: no effect, because a batch is left after one optimiser step anyway; "
            "drop it, or set rl.epochs or rl.minibatches above 1",
        )
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


@pytest.mark.parametrize(
    ("values", "problem"), [case for cases in RL_REFUSED.values() for case in cases]
)
def test_rl_refuses(values: dict[str, Any], problem: str) -> None:
    with refuses(problem):
        rl(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"group_size": 2},
        {"group_size": 1, "advantage": "return"},
        {"algorithm": "reinforce_pp", "advantage": {"centre_groups": True}, "group_size": 2},
        {"prompts_per_step": 3, "group_size": 4, "minibatches": 12},
        {"temperature": 0.01},
        {"engine": "server"},
        {"engine": "native", "top_k": 5},
        {"overlong_buffer": 32, "max_new_tokens": 32},
        {"algorithm": "dapo", "max_new_tokens": 1},
        {"warmup_steps": 12, "steps": 3, "epochs": 2, "minibatches": 2},
        {"dynamic_sampling": True, "max_resamples": 3, "group_size": 2},
        {"evaluate_every": 5, "evaluate_problems": 1},
        {"kl_stop": 0.1, "epochs": 2},
    ],
)
def test_rl_lets_be(values: dict[str, Any]) -> None:
    assert rl(**values)


RECIPE_REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "repeated_names": [
        (
            {"run": {"stages": ["rl", "eval", "rl"]}},
            "run.stages: 'rl' is there twice; name each once",
        ),
        (
            {"run": {"trackers": ["wandb", "wandb"]}, "rl": {}},
            "run.trackers: 'wandb' is there twice; name each once",
        ),
    ],
    "system_without_chat": [
        (
            {"model": {"chat": False, "system": "Be brief."}, "rl": {}},
            "model.system: no effect without a chat template; drop it, or set model.chat",
        )
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
            "task: missing, and sft and rl and eval cannot do without: "
            'write [task] with name = "..."',
        ),
        (
            {"task": None, "sft": {}},
            'task: missing, and sft cannot do without: write [task] with name = "..."',
        ),
    ],
    "rewards_without_weight": [
        (
            {"rewards": {"numeric": 0}, "rl": {}},
            "rewards: every weight is 0, so nothing can be learned; give one another weight",
        )
    ],
}


@pytest.mark.parametrize(
    ("values", "problem"), [case for cases in RECIPE_REFUSED.values() for case in cases]
)
def test_a_recipe_is_refused(values: dict[str, Any], problem: str) -> None:
    with refuses(problem):
        resolve(recipe_from_dict({"task": "sums", **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"options": {"num_layers": 1}}, "eval": {}},
        {"model": {"name": "some/folder", "options": {"attention": "sdpa"}}, "eval": {}},
        {"model": {"chat": True, "system": "Be brief."}, "eval": {}},
        {"model": {"dtype": "bfloat16", "compute": "bfloat16"}, "eval": {}},
        {"rewards": {"numeric": 0}, "eval": {}},
        {"rewards": {"numeric": 0, "brief": {"target": 1}}, "rl": {}},
    ],
)
def test_a_recipe_is_let_be(values: dict[str, Any]) -> None:
    assert resolved(values)


def test_demonstrations_come_from_the_task_or_a_file_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demos.jsonl").write_text("")
    values = {"sft": {"data": "demos.jsonl"}}
    assert resolve(recipe_from_dict(values)).task is None  # such a file needs no task
    with refuses(
        f"sft.data: no file 'demo.jsonl' (seen from {tmp_path}) and not \"task\"; "
        "did you mean 'demos.jsonl'? Known: demos.jsonl, task"
    ):
        resolved({"sft": {"data": "demo.jsonl"}})
    with refuses('sft.wrong_share: a file is taken as it is; drop it, or set sft.data to "task"'):
        resolved({"sft": {"data": "demos.jsonl", "wrong_share": 0.5}})
    assert resolved({"sft": {"wrong_share": 0.5}})


def test_the_warm_up_of_sft_fits_where_its_length_is_known() -> None:
    values = {"num_demonstrations": 33, "batch_size": 32, "epochs": 2}
    assert resolved({"sft": {**values, "warmup_steps": 4}})
    assert resolved({"sft": {"warmup_steps": 5}})
    with refuses("sft.warmup_steps: 5, but sft takes 4 optimiser steps; set it to less"):
        resolved({"sft": {**values, "warmup_steps": 5}})


def test_the_temperature_of_eval_needs_samples() -> None:
    with refuses("eval.temperature: no effect on the greedy answer; drop it, or set eval.samples"):
        resolved({"eval": {"temperature": 0.5}})


def test_several_broken_rules_are_reported_together() -> None:
    with refuses(
        "model.system: no effect without a chat template; drop it, or set model.chat",
        "sft.warmup_steps: 2, but sft takes 1 optimiser step; set it to less",
        RL_REFUSED["greedy_sampling"][0][1],
        RL_REFUSED["stop_of_one_step"][0][1],
    ):
        resolved(
            {
                "model": {"chat": False, "system": "x"},
                "sft": {"num_demonstrations": 1, "warmup_steps": 2},
                "rl": {"temperature": 0, "kl_stop": 0.1},
            }
        )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            {"rl": {"algorithm": "reinforce", "epochs": 2, "minibatches": 2}},
            [
                "rl.loss: 'naive' is right for the first optimiser step of a batch, and there are "
                "4; set rl.loss to unclipped or clipped, or take one step"
            ],
        ),
        ({"rl": {"algorithm": "reinforce"}}, []),
        (
            {"rl": {"warmup_steps": 13, "steps": 3, "epochs": 2, "minibatches": 2}},
            ["rl.warmup_steps: 13, but rl takes 12 optimiser steps: the peak is not reached"],
        ),
        ({"rl": {"warmup_steps": 12, "steps": 3, "epochs": 2, "minibatches": 2}}, []),
        ({"rl": {"epochs": 2}}, []),
        (
            {"rl": {"kl": {"estimator": "k1"}}},
            ["rl.kl.estimator: k1 in the loss has gradient 0 on average; use k2 or k3"],
        ),
        ({"rl": {"algorithm": "rloo"}}, []),
        ({"rl": {"kl": {"estimator": "k1", "direction": "forward"}}}, []),
        (
            {"model": {"dtype": "bfloat16"}, "rl": {}},
            ["model.dtype: in bfloat16 updates below 1/256 of a weight vanish; use float32"],
        ),
        ({"model": {"dtype": "bfloat16"}, "eval": {}}, []),
        ({"rl": {"algorithm": "reinforce", "epochs": 2}, "run": {"stages": ["eval"]}}, []),
    ],
)
def test_cautions(values: dict[str, Any], found: list[str]) -> None:
    assert cautions(resolved(values)) == found


def test_every_rule_is_tested_and_says_what_it_wants() -> None:
    assert [rule.__name__ for rule in (*RL_RULES, *ENGINE_RULES)] == list(RL_REFUSED)
    assert [rule.__name__ for rule in RECIPE_RULES] == list(RECIPE_REFUSED)
    refused = (*RECIPE_RULES, *SFT_RULES, *RL_RULES, *ENGINE_RULES, *EVAL_RULES)
    for rule in (*refused, *RECIPE_CAUTIONS, *RL_CAUTIONS):
        assert (rule.__doc__ or "").strip().endswith(".")
        assert "\n" not in (rule.__doc__ or "")
