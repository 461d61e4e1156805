"""Every rule that needs more than one key: what it refuses, word for word, and what it lets be."""

from pathlib import Path
from typing import Any

import pytest
from config.fakes import refuses, resolved, rl
from config.refused import (
    FROM_REWARD,
    MODEL_FIRST,
    PREFERENCE_REFUSED,
    RECIPE_REFUSED,
    RL_REFUSED,
    RL_WITHOUT_EFFECT,
    TEACHER_REFUSED,
    TEACHER_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
)

from posttrain.config import cautions, recipe_from_dict, resolve
from posttrain.config.preference_rules import PREFERENCE_RULES
from posttrain.config.recipe_rules import RECIPE_CAUTIONS, RECIPE_RULES, SFT_RULES, TEACHER_RULES
from posttrain.config.rl_rules import ENGINE_RULES, PIECE_RULES, RL_CAUTIONS, RL_RULES

pytestmark = pytest.mark.usefixtures("fake_tables")


@pytest.mark.parametrize(
    ("values", "problem"),
    [*(case for cases in RL_REFUSED.values() for case in cases), *RL_WITHOUT_EFFECT],
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
        {"max_lag": 4, "steps": 5},
        {"algorithm": "ppo", "steps": 5, "critic": {"warmup_steps": 4}},
        {"algorithm": "ppo", "whiten_rewards": True},
        {"advantage": "return_to_go", "whiten_rewards": True},
        {"advantage": "gae", "group_size": 1},
    ],
)
def test_rl_lets_be(values: dict[str, Any]) -> None:
    assert rl(**values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        *(case for cases in RECIPE_REFUSED.values() for case in cases),
        *(case for cases in TEACHER_REFUSED.values() for case in cases),
        *TEACHER_WITHOUT_EFFECT,
    ],
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
        {"teacher": {"model": "larger"}, "rl": {"algorithm": "gkd"}, "cluster": {}},
        {
            "teacher": {"model": "larger"},
            "rl": {"algorithm": "distill"},
            "cluster": {"learners": 2},
        },
        {"teacher": {"model": "larger"}, "eval": {}},
        {"rewards": {"numeric": 0, "brief": {"target": 1}}, "rl": {}},
    ],
)
def test_a_recipe_is_let_be(values: dict[str, Any]) -> None:
    assert resolved(values)


@pytest.fixture
def one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``pairs.jsonl`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("values", "problem"),
    [*(case for cases in PREFERENCE_REFUSED.values() for case in cases), *WITHOUT_EFFECT],
)
def test_preferences_are_refused(values: dict[str, Any], problem: str, one_file: Path) -> None:
    with refuses(problem.replace("{folder}", str(one_file))):
        resolved(values)


@pytest.mark.parametrize(
    "values",
    [
        {"prefer": {}, "reward": {}},
        {"reward": {"data": "pairs.jsonl"}, "task": None},
        {"reward": {"data": "pairs.jsonl", "test_share": 0.2}},
        {"reward": {"data": "pairs.jsonl", "test_data": "pairs.jsonl"}},
        {**MODEL_FIRST, "rl": {}, "eval": {}},
        {**MODEL_FIRST, "run": {"stages": ["prefer", "reward", "eval", "rl"]}},
        {"rewards": {"model": {"path": "judge"}}, "rl": {}, "eval": {}},
        {"rewards": {"model": 1}, "sft": {}},
        {"prefer": {"rewards": {"model": {"path": "judge"}}}},
        {"prefer": {"rewards": {"numeric": 0, "brief": {"target": 1}}}},
        {"rl": FROM_REWARD, "prefer": {}, "reward": {}},
        {"rl": {"algorithm": "ppo", "critic": {"source": "judge"}}},
        # a section whose stage is not run is left alone
        {"reward": {"test_share": 0.2, "test_data": "none"}, "run": {"stages": ["eval"]}},
        {"prefer": {"rewards": {"model": 1}}, "run": {"stages": ["eval"]}},
        {"rl": FROM_REWARD, "run": {"stages": ["eval"]}},
    ],
)
@pytest.mark.usefixtures("one_file")
def test_preferences_are_let_be(values: dict[str, Any]) -> None:
    assert resolve(recipe_from_dict({"task": "sums", **values}))


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


def test_demonstrations_are_held_out_once_and_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demos.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("")
    file, test = {"data": "demos.jsonl"}, {"test_data": "test.jsonl"}
    for values in ({**file, **test}, test, {**file, "test_share": 0.1}, {"result": "best"}):
        assert resolved({"sft": values})
    with refuses(
        f"sft.test_data: no file 'tests.jsonl' (seen from {tmp_path}); "
        "did you mean 'test.jsonl'? Known: demos.jsonl, test.jsonl"
    ):
        resolved({"sft": {**file, "test_data": "tests.jsonl"}})
    with refuses("sft.test_share: no effect beside sft.test_data; drop one of them"):
        resolved({"sft": {**file, **test, "test_share": 0.1}})
    with refuses("sft.test_share: held out are the task's own test prompts; drop it"):
        resolved({"sft": {"test_share": 0.1}})
    off = {"evaluate_every": 0}
    assert resolved({"sft": off})
    with refuses(
        "sft.test_data, sft.result: no effect with sft.evaluate_every = 0; drop them, or that"
    ):
        resolved({"sft": {**test, "result": "best", **off}})
    with refuses("sft.test_share: no effect with sft.evaluate_every = 0; drop it, or that"):
        resolved({"sft": {**file, "test_share": 0.1, **off}})


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
        "rl.kl_stop: no effect, because a batch is left after one optimiser step anyway; "
        "drop it, or set rl.epochs or rl.minibatches above 1",
        "sft.warmup_steps: 2, but sft takes 1 optimiser step; set it to less",
        RL_REFUSED["greedy_sampling"][0][1],
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
            [
                "rl.warmup_steps: 13, but rl takes 12 optimiser steps: the peak is not reached; "
                "set it to less"
            ],
        ),
        ({"rl": {"warmup_steps": 12, "steps": 3, "epochs": 2, "minibatches": 2}}, []),
        ({"rl": {"epochs": 2}}, []),
        (
            {"rl": {"kl": {"estimator": "k1"}}},
            [
                "rl.kl.estimator: k1 in the loss has gradient 0 on average; use k2 or k3, or set "
                "rl.kl.weighted to true"
            ],
        ),
        ({"rl": {"kl": {"estimator": "k1", "weighted": True}}}, []),
        (
            {"rl": {"algorithm": "kl_cov", "epochs": 1}},
            [
                "rl.loss: 'kl_cov' holds tokens back once π has left the old policy, and with one "
                "optimiser step per batch it never has; set rl.epochs or rl.minibatches above 1"
            ],
        ),
        ({"rl": {"algorithm": "kl_cov"}}, []),
        ({"rl": {"algorithm": "rloo"}}, []),
        (
            {"rl": {"max_lag": 1, "correction": "none"}},
            [
                "rl.correction: none, but with rl.max_lag the rollouts come from an older policy "
                'and are learned as if they did not; use "truncated" (the default with max_lag) or '
                '"masked"'
            ],
        ),
        ({"rl": {"max_lag": 1, "correction": "masked"}}, []),
        ({"rl": {"kl": {"estimator": "k1", "direction": "forward"}}}, []),
        (
            {"model": {"dtype": "bfloat16"}, "rl": {}},
            ["model.dtype: in bfloat16 updates below 1/256 of a weight vanish; use float32"],
        ),
        ({"model": {"dtype": "bfloat16"}, "eval": {}}, []),
        (
            {"model": {"dtype": "bfloat16"}, "prefer": {}, "reward": {}},
            ["model.dtype: in bfloat16 updates below 1/256 of a weight vanish; use float32"],
        ),
        (
            {"model": {"dtype": "bfloat16"}, "prefer": {}, "reward": {"learning_rate": 1e-3}},
            [],
        ),
        ({"model": {"dtype": "bfloat16"}, "sft": {}, "run": {"stages": ["eval"]}}, []),
        ({"rl": {"algorithm": "reinforce", "epochs": 2}, "run": {"stages": ["eval"]}}, []),
    ],
)
def test_cautions(values: dict[str, Any], found: list[str]) -> None:
    assert cautions(resolved(values)) == found


def test_every_rule_is_tested_and_says_what_it_wants() -> None:
    assert [rule.__name__ for rule in (*RL_RULES, *PIECE_RULES, *ENGINE_RULES)] == list(RL_REFUSED)
    assert [rule.__name__ for rule in RECIPE_RULES] == list(RECIPE_REFUSED)
    assert [rule.__name__ for rule in PREFERENCE_RULES] == list(PREFERENCE_REFUSED)
    assert [rule.__name__ for rule in TEACHER_RULES] == list(TEACHER_REFUSED)
    of_recipes = (*RECIPE_RULES, *TEACHER_RULES, *PREFERENCE_RULES, *RECIPE_CAUTIONS)
    of_sections = (*SFT_RULES, *RL_RULES, *PIECE_RULES, *ENGINE_RULES, *RL_CAUTIONS)
    for rule in (*of_recipes, *of_sections):
        assert (rule.__doc__ or "").strip().endswith(".")
        assert "\n" not in (rule.__doc__ or "")
