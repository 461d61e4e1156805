"""Pieces that are functions: found by name, options checked and written out."""

import sys
from pathlib import Path
from typing import Any

import pytest
from config.fakes import refuses, resolved, rl

from posttrain.config import recipe_from_dict

pytestmark = pytest.mark.usefixtures("fake_tables")


def test_tasks_and_rewards_are_found_and_their_options_written_out() -> None:
    values = {
        "task": {"name": "sums", "digits": 3},
        "rewards": {"numeric": 2, "brief": {"target": 5}},
    }
    recipe = resolved({**values, "rl": {}})
    assert recipe.task == {"name": "sums", "digits": 3, "operators": "+-", "think": False}
    assert recipe.rewards == {
        "numeric": {"weight": 2.0, "tolerance": 0.0},
        "brief": {"weight": 1.0, "target": 5},
    }
    short = resolved({"task": "words:a", "eval": {}})
    assert short.task == {"name": "words", "path": "a.txt", "lower": False}
    assert resolved({"rl": {}}).rewards == {}


def test_every_piece_is_checked_and_all_problems_are_reported_together() -> None:
    with refuses(
        "task 'sums': unknown option 'digit'; did you mean 'digits'? "
        "Known: digits, operators, think",
        "rewards: unknown name 'numerc'; did you mean 'numeric'? Known: brief, model, numeric",
        "rewards 'brief': option 'target' is required",
        "rl.loss 'clipped': option 'clip_low' must be float, got 'wide'",
        "rl.weights: unknown name 'token_men'; did you mean 'token_mean'? "
        "Known: sequence_mean, sequence_sum, token_mean",
        "rl.correction: unknown name 'truncate'; did you mean 'truncated'? "
        "Known: masked, none, truncated",
    ):
        resolved(
            {
                "task": {"name": "sums", "digit": 1},
                "rewards": {"numerc": 1, "brief": 1},
                "rl": {
                    "loss": {"clip_low": "wide"},
                    "weights": "token_men",
                    "correction": "truncate",
                },
            }
        )


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"loss": {"clip_low": -0.1}}, "rl.loss.clip_low: must be >= 0 and <= 1, got -0.1"),
        (
            {"advantage": {"name": "group_normalised", "epsilon": -1}},
            "rl.advantage.epsilon: must be >= 0, got -1",
        ),
        (
            {"weights": {"name": "sequence_sum", "length": 0}},
            "rl.weights.length: must be >= 1, got 0",
        ),
        ({"correction": {"name": "truncated", "cap": 0}}, "rl.correction.cap: must be > 0, got 0"),
        (
            {"algorithm": "ppo", "critic": {"loss": {"clip": 0}}},
            "rl.critic.loss.clip: must be > 0, got 0",
        ),
        (
            {"algorithm": "ppo", "critic": {"loss": {"name": "huber", "delta": -1}}},
            "rl.critic.loss.delta: must be > 0, got -1",
        ),
        (
            {"weights": {"name": "sequence_sum", "length": 2**70}},
            "rl.weights 'sequence_sum': int too big to convert; look at its options, of which one "
            "is too large",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_loaded(
    values: dict[str, Any], problem: str
) -> None:
    with refuses(problem):
        rl(**values)


def test_a_task_option_that_belongs_elsewhere_is_sent_there() -> None:
    with refuses(
        "task 'sums': unknown option 'steps'; known: digits, operators, think; "
        "steps is a key of [sft], [reward], [dpo] and [rl]"
    ):
        resolved({"task": {"name": "sums", "steps": 5}, "eval": {}})
    with refuses("task.name: missing; known: sums, words"):
        resolved({"task": {"digits": 5}, "eval": {}})
    with refuses("task: unknown name 'sum'; did you mean 'sums'? Known: sums, words"):
        resolved({"task": "sum", "eval": {}})


def test_options_of_the_tiny_model_are_checked() -> None:
    assert resolved({"model": {"options": {"num_layers": 1}}, "eval": {}}).model.options
    with refuses(
        "model.options: unknown option 'layers'; did you mean 'num_layers'? "
        "Known: hidden_size, num_layers"
    ):
        resolved({"model": {"options": {"layers": 1}}, "eval": {}})


def test_options_of_the_tiny_model_are_of_no_other() -> None:
    with refuses(
        "model.options: num_layers: only for the model 'tiny', and model.name is 'org/name'; "
        "leave out"
    ):
        resolved({"model": {"name": "org/name", "options": {"num_layers": 1}}, "eval": {}})


def test_another_model_on_the_command_line_does_not_keep_the_options_of_the_first() -> None:
    options = {"num_layers": 1, "attention": "eager"}
    values = {"model": {"options": options}, "eval": {}}

    def kept(*overrides: str) -> dict[str, Any]:
        return recipe_from_dict(values, overrides=overrides).model.options

    assert kept() == kept("--model.name", "tiny") == options
    assert kept("--model.name", "org/name") == {"attention": "eager"}
    assert kept("--model.options.num_layers", "2", "--model.name", "org/name") == {
        "attention": "eager",
        "num_layers": 2,
    }
    assert values["model"] == {"options": options}


def test_short_ways_to_write_an_adapter_and_no_divergence() -> None:
    assert recipe_from_dict({"adapter": True}).adapter.rank == 16
    assert recipe_from_dict({"adapter": False}).adapter.rank == 0
    assert recipe_from_dict({}, overrides=["--adapter", "true"]).adapter.rank == 16
    for short in (False, "none"):
        assert rl(kl=short).kl.placement == "none"
    assert rl(kl="loss", algorithm="grpo").kl.placement == "loss"
    assert recipe_from_dict({"adapter": 8}).adapter.rank == 8
    assert recipe_from_dict({}, overrides=["--adapter", "4"]).adapter.rank == 4
    assert rl(kl=0.25, algorithm="grpo").kl.coefficient == 0.25
    assert rl(kl=0, algorithm="grpo").kl == rl(kl={"coefficient": 0}, algorithm="grpo").kl
    overrides = ["--rl.kl.coefficient", "0.1"]
    found = recipe_from_dict({"rl": {"kl": "reward"}}, overrides=overrides).rl
    assert found is not None
    assert found.kl is not None
    assert (found.kl.placement, found.kl.coefficient) == ("reward", 0.1)


def test_functions_of_the_user_are_found_by_module_and_name() -> None:
    section = resolved({"rl": {"advantage": "posttrain.algorithms.advantages:max_only"}}).rl
    assert section is not None
    name = "posttrain.algorithms.advantages:max_only"
    assert section.advantage == {"name": name, "keeps": "reward"}
    with pytest.raises(ValueError, match=r"rl\.advantage: cannot import 'no_such:thing'"):
        rl(advantage="no_such:thing")


def test_the_engine_comes_last_because_it_loads_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(
        "rl.engine 'native': unknown option 'size'; did you mean 'batch_size'? Known: batch_size"
    ):
        rl(engine={"size": 1})
    with refuses("rl.engine: unknown name 'nativ'; did you mean 'native'? Known: native, server"):
        rl(engine="nativ")
    monkeypatch.setitem(sys.modules, "posttrain.rollout.engines", None)  # importing it now fails
    with pytest.raises(ValueError, match=r"rl\.temperature: 0 is greedy"):
        rl(temperature=0)
    with pytest.raises(ImportError):
        rl()


@pytest.mark.parametrize(
    ("text", "says"),
    [("def f(:\n", r"SyntaxError: .*; fix line 1 of .*broken_piece.py"), ("\n1 / 0\n", "line 2")],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_piece.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"rl.loss: cannot import 'broken_piece:f': .*{says}"):
        rl(loss="broken_piece:f")
