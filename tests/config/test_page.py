"""docs/configuration.md is what the models say, and its examples are recipes that hold."""

import re
from pathlib import Path

import pytest

from posttrain.config import read_recipe, recipe_from_dict, resolve
from posttrain.config.describe import tables
from posttrain.config.reference import configuration_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run: make pages"


def test_the_page_names_every_key_and_every_rule() -> None:
    page = configuration_page()
    named = ("task", "rewards", "[sweep]", *(name for name, _ in tables() if name))
    assert sorted(re.findall(r"^## \[(.*)\]$", page, flags=re.MULTILINE)) == sorted(named)
    assert "| `micro_batch_tokens` |" in page
    assert (
        "An advantage that compares the completions of a prompt needs as many as it compares."
        in page
    )
    assert "A reward model named by its stage is made earlier in the same run." in page


def test_the_examples_of_the_page_hold(tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", configuration_page(), flags=re.DOTALL)
    assert len(examples) == 5
    path = tmp_path / "example.toml"
    for number, example in enumerate(examples):
        path.write_text(example.replace('"my_module:my_reward" = 0.5', "exact = 0.5"))
        recipe = read_recipe(path)
        assert recipe.rewards or recipe.task or recipe.sweep, number
        if recipe.rl is not None:
            resolve(recipe, supplied=("engine",))


def test_the_tables_of_the_library_are_used() -> None:
    values = {"task": "reasoning_gym:chain_sum", "rewards": {"reasoning_gym": 1}, "rl": {}}
    recipe = resolve(recipe_from_dict(values))
    assert recipe.task is not None
    assert recipe.task["name"] == "reasoning_gym"
    assert recipe.task["dataset"] == "chain_sum"
    assert recipe.rl is not None
    assert recipe.rl.engine["name"] == "native"
    judged = {"task": "sort", "rewards": {"model": {"path": "judge"}}, "eval": {}}
    assert resolve(recipe_from_dict(judged)).rewards["model"]["path"] == "judge"
    tiny = {"model": {"options": {"hidden_size": 32, "layers": 1}}, "task": "sort", "eval": {}}
    with pytest.raises(ValueError, match=r"model\.options: unknown option 'layers'; did you mean"):
        resolve(recipe_from_dict(tiny))
