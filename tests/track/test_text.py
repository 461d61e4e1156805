"""Untrusted text on a terminal: nothing in it may act."""

import json
import unicodedata

import pytest

from posttrain.track.encoding import encode_json
from posttrain.track.text import printable

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
