"""Keys and values one by one: what is not known, of the wrong type, or out of range."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config.fakes import read, refuses, resolved

from posttrain.config import Recipe, RlSection, field_help
from posttrain.config.describe import find_field, tables, unknown_key
from posttrain.config.peers.option_names import LIBRARIES, WITHOUT, ours

pytestmark = pytest.mark.usefixtures("fake_tables")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rl": {"stepz": 5}}, "rl.stepz: unknown key; did you mean steps?"),
        ({"rl": {"group-size": 5}}, "rl.group-size: unknown key; did you mean group_size?"),
        ({"sft": {"group_size": 5}}, "sft.group_size: unknown key; group_size is a key of [rl]"),
        (
            {"run": {"epochs": 5}},
            "run.epochs: unknown key; epochs is a key of [sft], [reward], [dpo] and [rl]",
        ),
        (
            {"rl": {"coefficient": 0.1}},
            "rl.coefficient: unknown key; coefficient is a key of [rl.kl] and [rl.critic]",
        ),
        ({"rl": {"kind": "shared"}}, "rl.kind: unknown key; kind is a key of [rl.critic]"),
        (
            {"rl": {"rewards": {"numeric": 1}}},
            "rl.rewards: unknown key; [rewards] is a section of its own",
        ),
        ({"prefer": {"reward": {}}}, "prefer.reward: unknown key; did you mean rewards?"),
        ({"reward": {"brief": 1.0}}, "reward.brief: unknown key; did you mean [rewards]?"),
        ({"reward": {"my:score": 1.0}}, "reward.my:score: unknown key; did you mean [rewards]?"),
        ({"critic": {}}, "critic: unknown section; critic is a key of [rl]"),
        ({"rl": {"kl": {"top_k": 1}}}, "rl.kl.top_k: unknown key; top_k is a key of [rl]"),
        ({"rl": {"kl": {"estimater": 1}}}, "rl.kl.estimater: unknown key; did you mean estimator?"),
        (
            {"eval": {"zzz": 1}},
            "eval.zzz: unknown key; known: max_new_tokens, problems, samples, temperature",
        ),
        ({"rll": {}}, "rll: unknown section; did you mean [rl]?"),
        (
            {"zzz": {}},
            "zzz: unknown section; known: adapter, cluster, dpo, environment, eval, grading, "
            "model, prefer, reward, rewards, rl, run, sft, sweep, task, teacher",
        ),
        ({"group_size": 5}, "group_size: unknown key; group_size is a key of [rl]"),
        ({"placement": "loss"}, "placement: unknown key; placement is a key of [rl.kl]"),
        (
            {"rl": {"num_generations": 8}},
            "rl.num_generations: unknown key; TRL's num_generations is rl.group_size here",
        ),
        ({"rl": {"lr": 1e-5}}, "rl.lr: unknown key; what others call lr is rl.learning_rate here"),
        ({"rl": {"beta": 0.1}}, "rl.beta: unknown key; TRL's beta is rl.kl.coefficient here"),
        (
            {"rl": {"cliprange": 0.1}},
            "rl.cliprange: unknown key; TRL's cliprange is rl.loss.clip_low and rl.loss.clip_high "
            "here",
        ),
        (
            {"eval": {"max_tokens": 9}},
            "eval.max_tokens: unknown key; what others call max_tokens is eval.max_new_tokens here",
        ),
        ({"eval": {"n": 8}}, "eval.n: unknown key; what others call n is eval.samples here"),
        (
            {"rl": {"batch_size": 8}},
            "rl.batch_size: unknown key; what others call batch_size is rl.prompts_per_step and "
            "rl.micro_batch_tokens here",
        ),
        (
            {"rl": {"num_train_epochs": 1}},
            "rl.num_train_epochs: unknown key; TRL's num_train_epochs is rl.steps and "
            "rl.prompts_per_step here",
        ),
        (
            {"sft": {"num_train_epochs": 1}},
            "sft.num_train_epochs: unknown key; TRL's num_train_epochs is sft.epochs here",
        ),
        ({"run": {"n": 4}}, "run.n: unknown key; what others call n is rl.group_size here"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(
    values: dict[str, Any], problem: str
) -> None:
    with refuses(problem):
        read(values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rl": {"steps": "ten"}}, 'rl.steps: must be a whole number of at least 1, got "ten"'),
        ({"rl": {"steps": 1.5}}, "rl.steps: must be a whole number of at least 1, got 1.5"),
        ({"rl": {"steps": True}}, "rl.steps: must be a whole number of at least 1, got true"),
        ({"rl": {"steps": 0}}, "rl.steps: must be a whole number of at least 1, got 0"),
        ({"rl": {"group_size": 0}}, "rl.group_size: must be a whole number of at least 1, got 0"),
        ({"rl": {"learning_rate": 0}}, "rl.learning_rate: must be a number above 0, got 0"),
        (
            {"rl": {"learning_rate": float("nan")}},
            "rl.learning_rate: must be a number above 0, got nan",
        ),
        (
            {"sft": {"adam_betas": [0.9, 1.0]}},
            "sft.adam_betas: must be two numbers of at least 0 and below 1, got 1.0",
        ),
        (
            {"reward": {"adam_betas": [0.9]}},
            "reward.adam_betas: must be two numbers of at least 0 and below 1, got [0.9]",
        ),
        (
            {"rl": {"adam_betas": 0.9}},
            "rl.adam_betas: must be two numbers of at least 0 and below 1, got 0.9",
        ),
        (
            {"rl": {"whiten_rewards": "std"}},
            'rl.whiten_rewards: must be true, false, "population" or "sample", got "std"',
        ),
        ({"rl": {"top_p": 1.5}}, "rl.top_p: must be a number above 0 and at most 1, got 1.5"),
        ({"rl": {"top_p": "1"}}, 'rl.top_p: must be a number above 0 and at most 1, got "1"'),
        (
            {"sft": {"wrong_share": -0.1}},
            "sft.wrong_share: must be a number of at least 0 and at most 1, got -0.1",
        ),
        (
            {"rl": {"schedule": "cosin"}},
            'rl.schedule: must be "constant", "linear" or "cosine", got "cosin"; '
            'did you mean "cosine"?',
        ),
        (
            {"rl": {"dynamic_sampling": "yes"}},
            'rl.dynamic_sampling: must be true or false, got "yes"',
        ),
        ({"model": {"chat": "no"}}, 'model.chat: must be true, false or "auto", got "no"'),
        ({"model": {"name": 7}}, "model.name: must be text, not empty, got 7"),
        ({"model": {"name": ""}}, 'model.name: must be text, not empty, got ""'),
        ({"model": {"options": 7}}, "model.options: must be a table, got 7"),
        (
            {"model": {"hidden_size": 32}},
            "model.hidden_size: unknown key; hidden_size is an option of the tiny model: options = "
            '{ hidden_size = … }, or from Python {"options": {"hidden_size": …}}',
        ),
        ({"adapter": 4.5}, "adapter: must be a table, a rank, true or false, got 4.5"),
        (
            {"rl": {"kl": True}},
            'rl.kl: must be a table, a number, false, "loss" or "reward", got true',
        ),
        (
            {"run": {"trackers": "wandb"}},
            'run.trackers: must be a list of "tensorboard", "wandb", "module:Class" or tables with '
            'a name and options, got "wandb"; write ["wandb"]',
        ),
        (
            {"run": {"trackers": ["wanda"]}},
            'run.trackers: must be a list of "tensorboard", "wandb", "module:Class" or tables with '
            'a name and options, got "wanda"; did you mean "wandb"?',
        ),
        (
            {"run": {"stages": ["rl", "evil"]}},
            'run.stages: must be a list of "sft", "prefer", "reward", "dpo", "rl" or "eval", '
            'not empty, got "evil"; did you mean "eval"?',
        ),
        ({"dpo": {"beta": 0.0}}, "dpo.beta: must be a number above 0, got 0.0"),
        (
            {"dpo": {"label_smoothing": 0.5}},
            "dpo.label_smoothing: must be a number of at least 0 and below 0.5, got 0.5",
        ),
        (
            {"dpo": {"loss": "ppo"}},
            'dpo.loss: must be "dpo", "ipo", "kto", "orpo" or "simpo", got "ppo"; did you mean '
            '"ipo"?',
        ),
        (
            {"run": {"stages": []}},
            'run.stages: must be a list of "sft", "prefer", "reward", "dpo", "rl" or "eval", '
            "not empty, got []",
        ),
        ({"rl": 5}, "rl: must be a table, got 5"),
        (
            {"rl": {"kl": {"placement": "los"}}},
            'rl.kl.placement: must be "none", "loss" or "reward", got "los"; did you mean "loss"?',
        ),
        (
            {"rl": {"loss": 3}},
            "rl.loss: must be a name, or a table with a name and options, got 3",
        ),
        (
            {"task": {"name": 3}},
            "task: must be a name, or a table with a name and options, got { name = 3 }",
        ),
        ({"rewards": 3}, "rewards: must be a table of names and weights, got 3"),
        (
            {"rewards": {"numeric": "1"}},
            "rewards: the weight of 'numeric' must be a finite number, or a table with one, "
            'got { numeric = "1" }',
        ),
        (
            {"rewards": {"numeric": {"weight": True}}},
            "rewards: the weight of 'numeric' must be a finite number, or a table with one, "
            "got { numeric = { weight = true } }",
        ),
        (
            {"prefer": {"rewards": {"numeric": "1"}}},
            "prefer.rewards: the weight of 'numeric' must be a finite number, or a table with one, "
            'got { numeric = "1" }',
        ),
        ({"prefer": {"samples": 1}}, "prefer.samples: must be a whole number of at least 2, got 1"),
        (
            {"reward": {"test_share": 1.0}},
            "reward.test_share: must be a number above 0 and below 1, got 1.0",
        ),
        (
            {"rl": {"critic": {"kind": "share"}}},
            'rl.critic.kind: must be "separate" or "shared", got "share"; did you mean "shared"?',
        ),
        (
            {"rl": {"critic": {"coefficient": 0}}},
            "rl.critic.coefficient: must be a number above 0, got 0",
        ),
        ({"rl": {"penalty_target": 0}}, "rl.penalty_target: must be a number above 0, got 0"),
        (
            {"rl": {"kl": {"horizon": 0}}},
            "rl.kl.horizon: must be a whole number of at least 1, got 0",
        ),
        (
            {"rl": {"kl": {"dtype": "float16"}}},
            'rl.kl.dtype: must be "model" or "bfloat16", got "float16"; did you mean "bfloat16"?',
        ),
        (
            {"run": {"seed": 2**32}},
            "run.seed: must be a whole number of at least 0 and below 4294967296, got 4294967296",
        ),
        (
            {"run": {"folder": object}},
            "run.folder: must be text, not empty, got <class 'object'>",
        ),
        (
            {"eval": {"problems": list(range(99))}},
            "eval.problems: must be a whole number of at least 1, got "
            "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21...",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would(
    values: dict[str, Any], problem: str
) -> None:
    with refuses(problem):
        read(values)


def test_all_problems_are_reported_together() -> None:
    with refuses(
        "model.nane: unknown key; did you mean name?",
        "rl.steps: must be a whole number of at least 1, got 0",
        "rl.kl.coefficient: must be a number of at least 0, got -1",
        "rl.topk: unknown key; did you mean top_k?",
        "evil: unknown section; did you mean [eval]?",
    ):
        read(
            {
                "rl": {"topk": 5, "steps": 0, "kl": {"coefficient": -1}},
                "evil": {},
                "model": {"nane": ""},
            }
        )


def test_a_recipe_cannot_be_changed() -> None:
    recipe = resolved({"rl": {}})
    with pytest.raises(ValueError, match="frozen"):
        recipe.rl.steps = 7  # type: ignore[union-attr]


def test_python_values_are_taken_as_toml_would_hold_them() -> None:
    recipe = read({"run": {"folder": Path("runs") / "a", "stages": ("rl",)}, "rl": {"steps": None}})
    assert (recipe.run.folder, recipe.run.stages) == ("runs/a", ("rl",))
    assert recipe.rl is not None
    assert recipe.rl.steps == 100
    assert read({"rl": {"learning_rate": np.float64(0.5)}}).rl.learning_rate == 0.5  # type: ignore[union-attr]


def test_every_key_has_one_line_of_help_and_a_table_has_48_at_most() -> None:
    rows = field_help()
    known = (
        "run",
        "model",
        "adapter",
        "grading",
        "environment",
        "cluster",
        "sft",
        "prefer",
        "reward",
        "dpo",
        "teacher",
        "rl",
        "rl.curriculum",
        "rl.kl",
        "rl.critic",
        "eval",
    )
    num_keys = Counter(row.section for row in rows)
    assert tuple(num_keys) == known
    for row in rows:
        assert row.description.endswith("."), row
        assert "\n" not in row.description
        assert row.takes
        assert row.default
    assert max(num_keys.values()) <= 48


def test_help_of_a_section_holds_the_tables_inside_it() -> None:
    assert {row.section for row in field_help("rl")} == {
        "rl",
        "rl.curriculum",
        "rl.kl",
        "rl.critic",
    }
    row = next(row for row in field_help("rl") if row.key == "top_p")
    assert (row.takes, row.default) == ("a number above 0 and at most 1", "1.0")


def test_every_section_refuses_keys_it_does_not_know() -> None:
    assert Recipe in dict(tables()).values()
    for _, section in tables():
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
    with pytest.raises(ValueError, match="extra"):
        RlSection.model_validate({"zzz": 1})


def test_every_name_of_another_library_leads_to_a_key_that_there_is() -> None:
    """In every section that has it, under its full name; and it is no key of ours already."""
    sections = {name: section.model_fields for name, section in tables()}
    roots = Recipe.model_fields
    for theirs, choices in [row for table in LIBRARIES.values() for row in table.items()]:
        assert theirs not in sections["rl"], theirs
        told = {ours(theirs, known, sections=roots) for name, known in sections.items() if name} - {
            ""
        }
        assert told == set(choices.split("|")), theirs
        for name in (name for choice in choices.split("|") for name in choice.split(" and ")):
            homes = [
                find_field([*filter(None, home.split(".")), *name.split(".")])[0]
                for home in sections
            ]
            free = name.startswith(("loss.clip_", "task.", "rewards."))  # options of a piece
            assert free or any(home.endswith(name) for home in homes), name
        message = unknown_key(["rl", theirs])
        assert theirs in message
        assert " here" in message, message
    for theirs in WITHOUT:
        assert "has no counterpart: " in unknown_key(["rl", theirs])


@pytest.mark.parametrize(
    ("tracker", "problem"),
    [
        (
            {"name": "wandb", "projekt": "sums"},
            "run.trackers 'wandb': unknown option 'projekt'; did you mean 'project'? Known: "
            "entity, mode, project, samples_every",
        ),
        (
            {"name": "wandb", "mode": "offlin"},
            "run.trackers 'wandb': option 'mode' must be one of online, offline, disabled, got "
            "'offlin'; did you mean offline?",
        ),
        (
            {"name": "jsonl"},
            "run.trackers: unknown name 'jsonl'; known: tensorboard, wandb",
        ),
        (
            {"project": "sums"},
            "run.trackers: expected a name or a table with a 'name', got {'project': 'sums'}",
        ),
    ],
)
def test_the_options_of_a_tracker_are_checked_with_the_recipe(
    tracker: dict[str, Any], problem: str
) -> None:
    with refuses(problem):
        resolved({"run": {"trackers": [tracker]}, "task": "sums", "rl": {}})


def test_a_tracker_keeps_its_options() -> None:
    tracker = {"name": "wandb", "project": "sums"}
    recipe = resolved({"run": {"trackers": [tracker, "tensorboard"]}, "task": "sums", "rl": {}})
    assert recipe.run.trackers == (tracker, "tensorboard")
