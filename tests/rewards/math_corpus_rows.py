"""The corpus of mathematics: pairs of a right answer and what was answered, with the verdict."""

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "math_corpus"
GOLD_SETS = ("math", "aime", "minerva", "olympiad")
APART = ("bombs", "heldout", "unreadable")  # the files that are not pairs of a theme


class Row(NamedTuple):
    """One pair; ``completions`` are the ways in which the answer is handed in.

    ``equal`` is None where the right answer cannot be read: the score must be invalid.
    """

    theme: str
    gold: str
    completions: tuple[str, ...]
    equal: bool | None
    why: str


def spelled(text: Any) -> str:
    """A text as it is, or ``{"repeat": [prefix, body, count, suffix]}`` written out."""
    if isinstance(text, str):
        return text
    prefix, body, count, suffix = text["repeat"]
    return prefix + body * count + suffix


def themes() -> list[str]:
    """The names of the files with pairs."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl") if path.stem not in APART)


def rows(theme: str) -> list[Row]:
    """The pairs of one file: a bare answer is handed in as it is and in a box."""
    found = []
    for line in (FOLDER / f"{theme}.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        answer = spelled(row["answer"])
        bare = row.get("kind", "answer") == "answer"
        completions = (answer, f"\\boxed{{{answer}}}") if bare else (answer,)
        found.append(Row(theme, spelled(row["gold"]), completions, row["equal"], row["why"]))
    return found


def golds(name: str) -> list[str]:
    """Right answers in the manner of one benchmark."""
    return (FOLDER / f"gold_{name}.txt").read_text("utf-8").splitlines()
