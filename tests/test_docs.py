"""The pages work: every Python block runs, and every command line names what there is.

A block after ``<!-- not run: reason -->`` is left out, and so is a page that begins with that line.
Pages that read ``runs/demo`` find a small run there.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from small_runs import recipe, small_run

from posttrain.cli.app import app
from posttrain.config import recipe_from_dict, resolve
from posttrain.config.describe import find_field
from posttrain.envs import make_env

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: .+? -->\s*\Z", re.S)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
INLINE = re.compile(r"`(posttrain [^`]+)`")
FREE = ("task", "rewards", "model.options")  # their keys are those of what they name


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The blocks to run, each with the number of its first line."""
    if re.match(r"<!-- not run: .+? -->", text):
        return []
    return [
        (text.count("\n", 0, found.start()) + 2, found[2])
        for found in BLOCK.finditer(text)
        if found[1] == "python" and not NOT_RUN.search(text[: found.start()])
    ]


def command_lines(text: str) -> list[str]:
    """Every ``posttrain …`` of shell blocks and of inline code."""
    shell = [found[2] for found in BLOCK.finditer(text) if found[1] in ("bash", "console", "sh")]
    lines = [
        line.removeprefix("$ ").strip()
        for block in shell
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("posttrain ")] + INLINE.findall(text)


def check_command(line: str) -> None:
    """The command exists, and so does every option on the line."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line.partition(" #")[0])[1:]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{line!r}: no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for word in words:
        option = word.partition("=")[0]
        if not option.startswith("--") or option in (*known, "--help"):
            continue
        key = option.removeprefix("--")
        if command.name == "grade":  # its further options are the reward's own
            continue
        assert "." in key, f"{line!r}: no option {option}"
        assert command.context_settings.get("ignore_unknown_options"), (
            f"{line!r}: no option {option}"
        )
        free = key.startswith(tuple(f"{section}." for section in FREE))
        assert free or find_field(key.split("."))[0] == key, f"{line!r}: no key {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace for the page, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    if any('"runs/demo' in code for _, code in blocks):
        small_run(recipe(Path("runs/demo")))
    namespace: dict[str, Any] = {"__name__": page.stem}
    for line, code in blocks:
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    if page.name == "README.md":  # the first lines that anyone runs must be seen to learn
        rewards = namespace["rewards"]
        assert rewards[0] < 0.2, rewards
        assert rewards[-1] > 0.7, rewards
        assert namespace["batch"].rewards.mean() > 0.7  # and so must the loop of their own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_exist(page: Path) -> None:
    """Commands, options and keys; running them is other tests' work."""
    for line in command_lines(page.read_text(encoding="utf-8")):
        check_command(line)


def test_the_first_environment_of_its_page_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files of docs/environments.md, as a newcomer writes them, make an environment."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    blocks = {found[1]: found[2] for found in reversed(list(BLOCK.finditer(page)))}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_env.py").write_text(blocks["python"], encoding="utf-8")
    resolved = resolve(recipe_from_dict(tomllib.loads(blocks["toml"])))
    assert resolved.environment.workers == 2  # as the page says, further down
    assert make_env(resolved.task["env"]).tools[0]["function"]["name"] == "switch"


def test_blocks_and_commands_are_found() -> None:
    """What this file looks for, on a page written for it."""
    page = (
        "`posttrain explain`\n\n```python\na = 1\n```\n\n<!-- not run: it is slow -->\n"
        "```python\nb = 2\n```\n```console\n$ posttrain run a.toml \\\n  --rl.steps 6\nout\n```\n"
    )
    assert python_blocks(page) == [(4, "a = 1\n")]
    assert python_blocks("<!-- not run: no -->\n" + page) == []
    lines = command_lines(page)
    assert [line.split() for line in lines] == [
        ["posttrain", "run", "a.toml", "--rl.steps", "6"],
        ["posttrain", "explain"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "posttrain ruin a.toml",
        "posttrain run a.toml --rl.stepz 6",
        "posttrain run a.toml --steps 6",
        "posttrain generate M hi --temprature 1",
        "posttrain explain grpo --rl.steps 6",
        "posttrain model eksport a b",
    ],
)
def test_a_wrong_command_line_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match=r"no (command|option|key)"):
        check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_are_there_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / target).is_file(), f"{page.name}: no picture {target}"
    assert not re.search(r"^[A-Z]{5,}$", text, re.M)
