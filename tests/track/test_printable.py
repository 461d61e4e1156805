"""Untrusted text on a terminal: nothing in it may act."""

import json
import os
import subprocess
import unicodedata

import pytest

from posttrain.track.encoding import encode_json
from posttrain.track.printable import command_line, printable

# The planes that hold characters of this kind, and those of the tags at U+E0000.
EVERY_CHARACTER = "".join(map(chr, (*range(0x20000), *range(0xE0000, 0xE0100))))


def test_no_character_that_acts_survives() -> None:
    shown = printable(EVERY_CHARACTER)
    categories = {unicodedata.category(character) for character in shown}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.encode("utf-8")  # and no half character that a terminal could not be sent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 数 ½", "plain é 数 ½"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]8;;http://x\x07link", "\\x1b]8;;http://x\\x07link"),
        ("50%\roverwritten\b", "50%\\roverwritten\\x08"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("half \ud83d", "half \\ud83d"),
        ("two\nlines", "two\\nlines"),
    ],
)
def test_what_would_act_is_written_out(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "think " * 100 + "answer 7"
    shown = printable(text, limit=40)
    assert len(shown) == 40
    assert shown.startswith("think think")
    assert shown.endswith("answer 7")
    assert printable("short", limit=5) == "short"
    assert printable("short", limit=1) == "…"


def test_json_holds_what_is_not_a_number_and_what_is_not_text() -> None:
    nan, infinity = float("nan"), float("inf")
    value = {"a": [nan, (infinity, -infinity)], "text": "half \ud83d 数", "count": 3, "yes": True}
    back = json.loads(encode_json(value).decode("utf-8"), parse_constant=pytest.fail)
    assert back["a"] == ["NaN", ["Infinity", "-Infinity"]]
    assert (back["text"], back["count"], back["yes"]) == ("half \ud83d 数", 3, True)


ARGUMENTS = [
    "plain",
    "",
    "two words",
    "Reverse this word: begun\n",
    "a\tb\r\n\x1b[31m\x7f \\n \\",
    'it\'s "quoted" `date` $HOME $(date)',
    "it's\nnew!",
    "!! what!? !$",
    "=ls",
    "~/model",
    "# no comment",
    "-5+3=",
    "* ? [a] {b,c} ; & | < > ( ) ^",
    "数学 é ½ 🙂",
    "no-break\u00a0space, \u3000wide, \u2028line, \u202eturned, \u200d joined",
    "\x01" + "1f",
    os.fsdecode(b"not UTF-8: \xff\xe9"),
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_takes_a_command_line_apart_into_its_arguments(shell: str) -> None:
    """One line, nothing in it that a terminal does not show, and every argument comes back."""
    line = command_line("printf", "%s\\0", *ARGUMENTS)
    assert printable(line) == line
    try:
        said = subprocess.run([shell, "-c", line], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {shell} here")
    assert said.stdout.split(b"\0")[:-1] == [os.fsencode(argument) for argument in ARGUMENTS]


def test_a_prompt_with_a_history_leaves_the_exclamation_mark_alone() -> None:
    """At an interactive bash ``!`` stands for an earlier command, but not in what is quoted."""
    words = [argument for argument in ARGUMENTS if "!" in argument]
    lines = ["set -o history -o histexpand", "true", command_line("printf", "%s\\0", *words), ""]
    said = subprocess.run(
        ["bash"], input="\n".join(lines).encode(), capture_output=True, check=True
    )
    assert said.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words], said.stderr


def test_no_command_line_can_hold_a_nul() -> None:
    with pytest.raises(ValueError, match="NUL"):
        command_line("generate", "a\0b")
