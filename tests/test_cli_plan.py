"""``posttrain plan`` as a terminal shows it."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from command_line import Command, command_in
from small_runs import RECIPE, recipe, small_run

from posttrain.config import recipe_from_dict, to_toml
from posttrain.distributed.plans.compared import conclusion, others
from posttrain.distributed.plans.simulate import Costs, Layout, LinearTime, simulate

LAYOUT = Layout(
    learners=1,
    engines=1,
    max_lag=1,
    prompts_per_step=4,
    group_size=2,
    bandwidth=1e9,
    learner_bandwidth=1e9,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a run of it."""
    folder = tmp_path_factory.mktemp("work")
    given = recipe(folder / "run", sft=None, eval=None, rl={"steps": 6})
    small_run(given)
    (folder / "recipe.toml").write_text(to_toml(recipe_from_dict(given)))
    return folder


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], work: Path
) -> Command:
    return command_in(work, columns=100, monkeypatch=monkeypatch, capsys=capsys)


def test_a_cluster_is_planned_from_a_run(posttrain: Command) -> None:
    asked = ("recipe.toml", "--from", "run", "--learners", "8", "--engines", "4", "--max-lag", "1")
    code, out, _ = posttrain("plan", *asked)
    assert code == 0
    rows = [line.split()[:3] for line in out.splitlines()]
    for row in (["8", "4", "1"], ["8", "8", "1"], ["16", "4", "1"], ["8", "4", "0"]):
        assert row in rows
    assert "run: 4 steps, from step 3" in out
    assert "1.25 GB/s to each" in out
    assert "8 learners, 4 engines, max_lag 1: " in out
    _, out, _ = posttrain("plan", *asked, "--json", "--bandwidth", "10")
    found = json.loads(out)
    assert set(found["clusters"]) == {"asked", "engines", "learners", "lag", "alone"}
    planned = found["clusters"]["asked"]
    assert planned["layout"]["bandwidth"] == 1e10
    assert planned["layout"]["group_size"] == RECIPE["rl"]["group_size"]
    assert 0 <= planned["prediction"]["learner_idle"] <= 1
    samples = planned["prediction"]["samples_per_second"] * planned["prediction"]["step"]
    assert samples == pytest.approx(16, rel=1e-6)


def test_a_cluster_is_planned_from_a_trial_and_from_the_recipe(posttrain: Command) -> None:
    """Without options, the recipe's own [cluster] is planned."""
    overrides = ("--cluster.learners", "2", "--cluster.engines", "3", "--rl.max_lag", "2")
    where = ("--cluster.address", "local")
    code, out, _ = posttrain("plan", "recipe.toml", *overrides, *where, "--json")
    assert code == 0
    found = json.loads(out)
    layout = found["clusters"]["asked"]["layout"]
    assert (layout["learners"], layout["engines"], layout["max_lag"]) == (2, 3, 2)
    assert any("measured here, on cpu" in fact for fact in found["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the recipe first"),
        (("recipe.toml", "--gpu", "8GB", "--learners", "2"), "--gpu: is about one machine"),
        (("tiny", "--gpu", "big"), "'big' is neither an amount of memory (8GB) nor a GPU"),
        (("nowhere/at-all", "--gpu", "8GB"), "nothing is downloaded for a plan"),
        (
            ("my-own-model", "--gpu", "8GB", "--shape", "hidden=8,width=2"),
            "--shape: unknown option",
        ),
        (("recipe.toml", "--run.stages", '["eval"]'), "has no stage rl"),
        (("recipe.toml", "--lerners", "8"), "did you mean --learners?"),
        (("recipe.toml", "--from", "nowhere"), "nowhere"),
        (("recipe.toml", "--rl.stepz", "8"), "did you mean steps?"),
    ],
)
def test_mistakes_are_said(posttrain: Command, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = posttrain("plan", *arguments)
    assert code == 2
    assert said in " ".join(err.split())


def test_one_machine_is_planned_without_the_model(posttrain: Command) -> None:
    """A shape that is only numbers, in 1 GB: what does not fit is said, and what would help."""
    sizes = "hidden=512,layers=8,heads=8,kv_heads=2,intermediate=2048,vocabulary=100000"
    asked = ("plan", "my-own-model", "--gpu", "1GB", "--shape", sizes, "--rl.max_new_tokens", "64")
    code, out, _ = posttrain(*asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert not found["fits"]
    assert found["peak"] == max(found["peaks"].values()) > 2**30
    weights = 100_000 * 512 + 8 * (512 * (2 * 512 + 2 * 128 + 3 * 2048) + 2 * 512) + 512
    assert found["stays"]["weights"] == 4 * weights
    assert found["options"]["adapter.rank = 16"] < found["peak"]
    assert "GPU of 1GB" in found["assumptions"][0]


MINE = "hidden=1024,layers=6,heads=8,intermediate=4096,vocabulary=4000"


def test_what_makes_a_model_fit_is_written_as_a_recipe_has_it(posttrain: Command) -> None:
    """100 million weights: 2.7 GiB as they are, and there is 1."""
    sizes = ("--shape", MINE, "--prompt-tokens", "64", "--rl.max_new_tokens", "64")
    asked = ("plan", "my-own-model", "--gpu", "1GB", *sizes, "--model.compile", "false")
    code, out, _ = posttrain(*asked)
    assert code == 0
    said, _, lines = out.partition("# in a recipe\n")
    words = " ".join(said.split())
    assert (
        "It would fit with rl.checkpoint_activations = true, adapter.rank = 16: 0.48 GiB" in words
    )
    assert "smaller model" not in words
    written = tomllib.loads(lines)
    assert written == {"rl": {"checkpoint_activations": True}, "adapter": {"rank": 16}}
    found = json.loads(posttrain(*asked, "--json")[1])
    assert found["together"] == {"rl.checkpoint_activations": True, "adapter.rank": 16}
    again = [*asked, "--rl.checkpoint_activations", "true", "--adapter.rank", "16", "--json"]
    planned = json.loads(posttrain(*again)[1])
    assert planned["fits"]
    assert planned["peak"] == found["together_peak"]


def test_what_makes_a_recipe_fit_is_a_command(posttrain: Command, work: Path) -> None:
    """With what was given on the command line, and with what the rules then say to beware of."""
    given = recipe("run", sft=None, eval=None, rl={"learning_rate": 1e-6})
    given["model"] = {"name": "tiny", "options": {"hidden_size": 1024, "num_layers": 6}}
    (work / "large.toml").write_text(to_toml(recipe_from_dict(given)))
    code, out, _ = posttrain("plan", "large.toml", "--gpu", "1GB", "--rl.max_new_tokens", "8")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("posttrain run"))
    assert shlex.split(line)[2:5] == ["large.toml", "--rl.max_new_tokens", "8"]
    assert "--adapter.rank" in line
    assert "Caution: rl.learning_rate: 1e-06 is a rate for all weights" in " ".join(out.split())
    code, out, _ = posttrain("plan", *shlex.split(line)[2:], "--gpu", "1GB")
    assert "It fits" in out


def test_one_machine_is_planned_as_a_table(posttrain: Command) -> None:
    code, out, _ = posttrain("plan", "recipe.toml", "--gpu", "8GB")
    assert code == 0
    for said in ("weights", "KV cache", "peak of learning", "a step takes about", "It fits"):
        assert said in out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "to make (1.04 s, most of it sampling) than to learn (200 ms); 1 learner, 2 engines"),
        (
            {"train": LinearTime(0.0, 1.0)},
            "to learn (80 s) than to make (1.04 s); 2 learners, 1 engine",
        ),
        ({"grading": 10.0}, "most of it grading) than to learn (200 ms); twice the engines or"),
        ({"weight_bytes": 1e11}, "Bringing weights to the engines (100 s) takes longest; twice"),
    ],
)
def test_the_conclusion_names_what_is_slow_and_what_helps(
    changed: dict[str, object], said: str
) -> None:
    """8 completions of 10 tokens: 80 tokens to decode one by one, and to learn."""
    costs = {
        "decode": LinearTime(0.0, 0.0125),
        "train": LinearTime(0.2, 0.0),
        "grading": 0.005,
        "weight_bytes": 0.0,
        "groups": [[10, 10]],
        **changed,
    }
    layouts = {"asked": LAYOUT, **others(LAYOUT)}
    found = {name: simulate(Costs(**costs), each) for name, each in layouts.items()}
    assert said in conclusion(layouts, found)
