"""``--section.key value``: what it means, and what it does to the file underneath."""

from pathlib import Path
from typing import Any

import pytest
from config.fakes import read, refuses, resolved

from posttrain.config import ConfigError, cautions, read_recipe, to_dict
from posttrain.config.read import parse_overrides

pytestmark = pytest.mark.usefixtures("fake_tables")


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--rl.steps", "6"], {"rl.steps": 6}),
        (["--rl.steps=6"], {"rl.steps": 6}),
        (["--rl.steps", "6", "--rl.steps", "7"], {"rl.steps": 7}),
        (["--rl.kl.coefficient", "0.1"], {"rl.kl.coefficient": 0.1}),
        (["--rl.kl", '{placement = "none"}'], {"rl.kl": {"placement": "none"}}),
        (["--rl.learning_rate", "1e-6"], {"rl.learning_rate": 1e-6}),
        (["--rl.learning_rate", ".5"], {"rl.learning_rate": 0.5}),
        (["--rl.learning_rate", "5."], {"rl.learning_rate": 5.0}),
        (["--task.low", "-3"], {"task.low": -3}),
        (["--task.digits", "2"], {"task.digits": 2}),
        (["--task", "sums"], {"task": "sums"}),
        (["--rl.dynamic_sampling", "true"], {"rl.dynamic_sampling": True}),
        (["--rl.dynamic_sampling=false"], {"rl.dynamic_sampling": False}),
        (["--rl.dynamic_sampling", "True"], {"rl.dynamic_sampling": "True"}),
        (["--run.stages", '["rl"]'], {"run.stages": ["rl"]}),
        (["--run.stages", "sft, rl"], {"run.stages": ["sft", "rl"]}),
        (["--run.trackers", "wandb"], {"run.trackers": ["wandb"]}),
        (
            ["--run.trackers", '{name = "wandb", project = "sums"}'],
            {"run.trackers": [{"name": "wandb", "project": "sums"}]},
        ),
        (["--rl.stop", "{a = 1}"], {"rl.stop": ["{a = 1}"]}),
        (["--run.stages", '"sft,rl"'], {"run.stages": ["sft,rl"]}),
        (["--rl.stop", r'"\n"'], {"rl.stop": ["\n"]}),
        (["--rl.stop", '", "'], {"rl.stop": [", "]}),
        (["--rl.stop", '""'], {"rl.stop": [""]}),
        (["--rl.stop", ""], {"rl.stop": [""]}),
        (["--rl.stop", "[]"], {"rl.stop": []}),
        (["--rl.stop", '["a", " b"]'], {"rl.stop": ["a", " b"]}),
        (["--rl.stop", "a, b "], {"rl.stop": ["a, b "]}),
        (["--rl.stop", "[/INST]"], {"rl.stop": ["[/INST]"]}),
        (["--rl.stop", "4"], {"rl.stop": ["4"]}),
        (["--rl.stop", r"\n\nQuestion:"], {"rl.stop": ["\n\nQuestion:"]}),
        (["--rl.stop", r"\boxed{"], {"rl.stop": [r"\boxed{"]}),
        (["--rl.stop", r"'\text{'"], {"rl.stop": [r"\text{"]}),
        (["--rl.schedule", "cosine"], {"rl.schedule": "cosine"}),
        (["--rl.schedule", '"cosine"'], {"rl.schedule": "cosine"}),
        (["--run.folder", "2030-01-31"], {"run.folder": "2030-01-31"}),
        (["--task.day", "2030-01-31"], {"task.day": "2030-01-31"}),
        (["--run.folder", "7"], {"run.folder": "7"}),
        (["--run.folder", "a b=c"], {"run.folder": "a b=c"}),
        (["--model.system=1 # two"], {"model.system": "1 # two"}),
        (["--model.system", ""], {"model.system": ""}),
        (["--model.system", "1\nseed = 2"], {"model.system": "1\nseed = 2"}),
        (["--task.text", "1\nseed = 2"], {"task.text": "1\nseed = 2"}),
        (["--rewards.numeric", "0.5"], {"rewards.numeric": 0.5}),
        (["--rewards.pkg.mod:fn", "1"], {("rewards", "pkg.mod:fn"): 1}),
        (["--rewards.pkg.mod:fn.weight", "1"], {("rewards", "pkg.mod:fn", "weight"): 1}),
        (['--rewards."pkg.mod:fn".weight', "1"], {("rewards", "pkg.mod:fn", "weight"): 1}),
        (["--prefer.rewards.numeric", "1"], {"prefer.rewards.numeric": 1}),
        (["--prefer.rewards.pkg.mod:fn", "1"], {("prefer", "rewards", "pkg.mod:fn"): 1}),
        (
            ["--prefer.rewards.pkg.mod:fn.tolerance", "1"],
            {("prefer", "rewards", "pkg.mod:fn", "tolerance"): 1},
        ),
        (["--rl.critic.loss.clip", "0.1"], {"rl.critic.loss.clip": 0.1}),
    ],
)
def test_an_override_means(arguments: list[str], changes: dict[Any, Any]) -> None:
    expected = {tuple(k.split(".")) if isinstance(k, str) else k: v for k, v in changes.items()}
    found = parse_overrides(arguments)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["rl.steps", "6"], "'rl.steps': not an option; write --section.key value (--rl.steps 6)"),
        (["--rl..steps=6"], "'--rl..steps=6': not an option; write --section.key value"),
        (["--rl.", "6"], "'--rl.': not an option; write --section.key value"),
        (["--"], "'--': not an option; write --section.key value"),
        (["--rl.steps"], "--rl.steps: needs a value: --rl.steps VALUE"),
        (
            ["--rl.dynamic_sampling", "--rl.steps=6"],
            "--rl.dynamic_sampling: needs a value: --rl.dynamic_sampling true",
        ),
        (
            ["--partial", "6"],
            "--partial: name its section, --section.key; partial is a key of [rl]",
        ),
        (
            ["--rl.stop", r"\text{"],
            r"--rl.stop: \text{ may mean a backslash, or an escape; write it in quotes, as TOML: "
            r"""'"\text{"' reads its escapes, "'\text{'" keeps its backslashes""",
        ),
        (["--rl.stop", r"\\n"], r"--rl.stop: \\n may mean a backslash, or an escape"),
        (["--n=6"], "--n: name its section, --section.key; what others call n is rl.group_size"),
        (["--beta=6"], "--beta: name its section, --section.key; beta is a key of [dpo]"),
        (["--kl_coef=6"], "--kl_coef: name its section, --section.key; TRL's kl_coef is rl.kl"),
        (["--evil=6"], "--evil: name its section, --section.key; did you mean 'eval'?"),
    ],
)
def test_an_argument_that_is_no_override_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(arguments)
    assert caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["--rl.stepz", "6"], "--rl.stepz: unknown key; did you mean steps?"),
        (["--rll.steps", "6"], "--rll.steps: unknown section; did you mean [rl]?"),
        (["--rl.steps", "six"], '--rl.steps: must be a whole number of at least 1, got "six"'),
        (
            ["--rl.dynamic_sampling=True"],
            '--rl.dynamic_sampling: must be true or false, got "True"',
        ),
        (["--rl.stop", ""], '--rl.stop: must be a list of texts that are not empty, got ""'),
        (["--rl.top_k.x=1"], "--rl.top_k.x: rl.top_k is 3, not a table"),
        (
            ["--rl.critic=shared", "--rl.critic.loss=squared"],
            '--rl.critic.loss: rl.critic is "shared", not a table',
        ),
        (
            ["--rl.steps", "[" * 9999],
            f'--rl.steps: must be a whole number of at least 1, got "{"[" * 76}...',
        ),
    ],
)
def test_a_bad_override_is_named_as_it_was_typed(overrides: list[str], problem: str) -> None:
    with refuses(problem):
        read({"rl": {"top_k": 3}}, *overrides)


def test_overrides_go_over_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'task = "sums"\n[rewards]\nnumeric = 2\n[rl]\nsteps = 5\ntop_k = 3\nloss = "naive"'
    )
    overrides = ["--rl.steps=6", "--rl.loss.clip_low=1", "--task.digits", "3", "--sft.epochs=2"]
    values = to_dict(read_recipe(path, [*overrides, "--rewards.numeric.tolerance", "0.5"]))
    assert values["rl"]["steps"] == 6
    assert values["rl"]["top_k"] == 3
    assert values["rl"]["loss"] == {"name": "naive", "clip_low": 1}
    assert values["task"] == {"name": "sums", "digits": 3}
    assert values["rewards"] == {"numeric": {"weight": 2.0, "tolerance": 0.5}}
    assert values["sft"]["epochs"] == 2
    assert values["run"]["folder"] == "runs/mine"


def test_options_go_over_the_weight_of_an_annotators_reward() -> None:
    given = {"prefer": {"rewards": {"numeric": 2}}}
    values = to_dict(read(given, "--prefer.rewards.numeric.tolerance", "0.5"))
    assert values["prefer"]["rewards"] == {"numeric": {"weight": 2.0, "tolerance": 0.5}}


@pytest.mark.parametrize(
    ("given", "override", "found"),
    [
        ({"rl": {"kl": 0.1}}, "--rl.kl.target=3", {"coefficient": 0.1, "target": 3}),
        ({"rl": {"kl": 0.1}}, "--rl.kl.coefficient=0.05", {"coefficient": 0.05}),
        ({"rl": {"kl": "loss"}}, "--rl.kl.target=3", {"placement": "loss", "target": 3}),
        ({"rl": {"kl": False}}, "--rl.kl.placement=loss", {"placement": "loss"}),
        ({"adapter": 4}, "--adapter.rank=8", {"rank": 8}),
        ({"adapter": True}, "--adapter.alpha=8", {"rank": 16, "alpha": 8}),
        ({"rl": {"loss": "naive"}}, "--rl.loss.clip_low=1", {"name": "naive", "clip_low": 1}),
    ],
)
def test_an_option_goes_over_the_short_form_of_its_table(
    given: dict[str, Any], override: str, found: dict[str, Any]
) -> None:
    part = override.removeprefix("--").partition("=")[0].rpartition(".")[0]
    table: Any = to_dict(read(given, override))
    for name in part.split("."):
        table = table[name]
    assert {key: table[key] for key in found} == found


def test_the_callers_dict_is_left_alone() -> None:
    values = {"rl": {"steps": 5}}
    read(values, "--rl.steps", "6")
    assert values == {"rl": {"steps": 5}}


@pytest.mark.parametrize(
    ("values", "override", "keys"),
    [
        (
            {"evaluate_every": 5, "evaluate_problems": 9},
            ["--rl.evaluate_every", "0"],
            ["rl.evaluate_problems"],
        ),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k2", "refresh_every": 3}},
            ["--rl.kl.coefficient", "0"],
            ["rl.kl.estimator", "rl.kl.refresh_every"],
        ),
        ({"algorithm": "ppo", "kl_stop": 0.1}, ["--rl.epochs", "1"], ["rl.kl_stop"]),
        (
            {"algorithm": "ppo", "critic": {"warmup_steps": 2}, "whiten_rewards": True},
            ["--rl.algorithm", "grpo"],
            ["rl.whiten_rewards", "rl.critic"],
        ),
    ],
)
def test_what_the_command_line_leaves_without_effect_is_left_out_with_a_word(
    values: dict[str, Any], override: list[str], keys: list[str]
) -> None:
    recipe = resolved({"rl": values}, *override)
    told = "left out, because the command line leaves it without effect; drop it from the recipe"
    assert cautions(recipe) == [f"{key}: {told}" for key in keys]
    (name, value) = override
    without = {key: given for key, given in values.items() if f"rl.{key}" not in keys}
    inner = {key.rpartition(".")[2] for key in keys}
    if "kl" in without:
        without["kl"] = {k: v for k, v in values["kl"].items() if k not in inner}
    assert to_dict(recipe) == to_dict(resolved({"rl": without}, name, value))


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({"evaluate_every": 5}, ["--rl.evaluate_every", "0", "--rl.evaluate_problems", "9"]),
        ({"evaluate_problems": 9}, ["--rl.steps", "3"]),  # the recipe itself is wrong
        ({"evaluate_problems": 9}, []),
    ],
)
def test_what_has_no_effect_on_its_own_is_refused(
    values: dict[str, Any], overrides: list[str]
) -> None:
    with refuses("rl.evaluate_problems: no effect; drop it, or set rl.evaluate_every above 0"):
        resolved({"rl": values}, *overrides)
