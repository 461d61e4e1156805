"""Reading files: syntax, encoding, names, and errors that say where."""

import re
from pathlib import Path

import pytest

from posttrain.config import ConfigError, read_recipe, resolve

pytestmark = pytest.mark.usefixtures("fake_tables")


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "demo.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rl]\nsteps = 5\nsteps = 6\n", ":3: Cannot overwrite a value, in: steps = 6"),
        ("[rl]\nsteps = \n", ":2: Invalid value, in: steps ="),
        ("[rl\nsteps = 5\n", ":1: Expected ']' at the end of a table declaration, in: [rl"),
        ("[rl]\nfolder = 'a", ":2: Expected \"'\", in: folder = 'a"),
        (
            "[rewards]\nmy:fn = 1.0\n",
            ":2: Expected '=' after a key in a key/value pair; a key with a \":\" is written in "
            'quotes, "module:function" = 1.0, in: my:fn = 1.0',
        ),
        ("[rl]\nstepz = 5\n", ": rl.stepz: unknown key; did you mean steps?"),
        (b"\xff\xfe", ": not UTF-8 text (invalid start byte at byte 0); a recipe is TOML"),
        (
            f"[rl]\nsteps = {'[' * 9999}",
            ": lists or tables in each other, too deep to read; write them flatter",
        ),
    ],
)
def test_an_error_names_the_file_and_the_line(
    text: str | bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path) + message)}$"):
        read_recipe(path)


def test_several_problems_stand_under_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[rl]\nstepz = 5\nsteps = 0\n")
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(caught.value).splitlines() == [
        f"{path}: 2 problems",
        "  rl.steps: must be a whole number of at least 1, got 0",
        "  rl.stepz: unknown key; did you mean steps?",
    ]
    assert len(caught.value.problems) == 2


def test_a_missing_file_is_refused_with_the_near_one(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(
        ConfigError, match=r"demos\.toml: no such recipe; did you mean .*demo\.toml"
    ):
        read_recipe(tmp_path / "demos.toml")
    for number in range(30):
        write(tmp_path, "").rename(tmp_path / f"other-{number}.toml")
    with pytest.raises(ConfigError, match=r"no such recipe; .* and 20 more$") as caught:
        read_recipe(tmp_path / "other.toml")
    assert str(caught.value).count(str(tmp_path / "other-")) == 1 + 10  # the nearest, and ten known
    with pytest.raises(ConfigError, match=r"no \.toml file in .* either$"):
        read_recipe(tmp_path / "empty" / "demo.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_recipe(tmp_path)


def test_errors_after_reading_name_the_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, 'task = "sums"\n[rl]\ntemperature = 0\n')
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: rl.temperature: 0 is greedy"):
        resolve(read_recipe(path))
    path = write(tmp_path, 'task = "sum"\n[rl]\n')
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: task: unknown name 'sum'"):
        resolve(read_recipe(path))


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, b"\xef\xbb\xbf[run]\nseed = 3\n")).run.seed == 3


def test_the_run_folder_is_named_after_the_recipe(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, "")).run.folder == "runs/demo"
    assert read_recipe(write(tmp_path, "run.folder = 'there'")).run.folder == "there"
