"""Help shows what it was given: every word of it, and the recipe that a command takes."""

import re
from typing import Any

import pytest
from command_line import Command, command_in
from typer.main import get_command

from posttrain.cli.app import app


def _commands(group: Any, *above: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        words = (*above, name)
        found |= _commands(command, *words) if inner else {" ".join(words): command}
    return found


COMMANDS = _commands(get_command(app))
OF_RECIPE = {
    **dict.fromkeys(("run", "check"), "[OPTIONS] RECIPE.toml [--section.key value …]"),
    **dict.fromkeys(
        ("sft", "prefer", "reward", "dpo", "rl"), "[OPTIONS] [RECIPE.toml] [--section.key value …]"
    ),
    "plan": "[OPTIONS] MODEL|RECIPE.toml [--section.key value …]",
    "resume": "[OPTIONS] {folder} [--section.key value …]",
}


@pytest.fixture
def posttrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> Command:
    """Run a command in a terminal that is wide enough for every line."""
    return command_in(tmp_path, columns=400, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_help_is_taken_for_markup(posttrain: Command, name: str) -> None:
    command = COMMANDS[name]
    shown = " ".join(posttrain(*name.split(), "--help").out.replace("│", " ").split())
    given = [command.help, *(parameter.help for parameter in command.params)]
    for text in filter(None, given):
        for paragraph in text.split("\n\n"):
            assert " ".join(paragraph.replace("\\[", "[").split()) in shown


@pytest.mark.parametrize("name", OF_RECIPE)
def test_the_usage_names_what_a_command_takes(posttrain: Command, name: str) -> None:
    shown = " ".join(posttrain(name, "--help").out.split())
    assert f"posttrain {name} {OF_RECIPE[name]}" in shown


def test_every_command_that_takes_a_recipe_is_listed_here() -> None:
    told = {n for n, c in COMMANDS.items() if re.search(rf"posttrain {n} \S*RECIPE", c.help or "")}
    assert told | {"resume"} == OF_RECIPE.keys()
