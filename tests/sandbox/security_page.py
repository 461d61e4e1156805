"""Writes the tables of attacks into docs/security.md: ``python tests/sandbox/security_page.py``."""

import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
SEEN = {"": "", "none": "without a sandbox", "naive": "in a naive grader"}


def attack_table(attacks: Mapping) -> str:
    """The table, in Markdown: one row for each attack, in the order of the tests."""
    rows = ["| attack | tries to | scores 0, because | gets through |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {attack.tries} | `{attack.happens}` | {SEEN[attack.control]} |"
        for name, attack in attacks.items()
    ]
    return "\n".join(rows) + "\n"


def bomb_table(bombs: Mapping[str, str]) -> str:
    """The table of answers that the math grader was given; long ones are cut."""
    rows = ["| bomb | answer | what happens |", "|---|---|---|"]
    for name, text in bombs.items():
        shown = text if len(text) <= 40 else f"{text[:30]}… ({len(text):,} characters)"
        rows.append(f"| {name} | `{shown.replace('|', chr(92) + '|')}` | wrong, within a second |")
    return "\n".join(rows) + "\n"


def replaced(text: str, name: str, *, table: str) -> str:
    """The page with what stands between two marks replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + table + end + tail


def main() -> None:
    """Write both tables."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from rewards.test_math_bombs import BOMBS
    from sandbox.attacks_forgery import ATTACKS

    text = PAGE.read_text(encoding="utf-8")
    text = replaced(text, "attacks", table=attack_table(ATTACKS))
    PAGE.write_text(replaced(text, "bombs", table=bomb_table(BOMBS)), encoding="utf-8")


if __name__ == "__main__":
    main()
