"""Writes the table of attacks into docs/security.md: ``python tests/rewards/security_page.py``."""

import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- attacks: begin -->\n", "<!-- attacks: end -->\n"
SEEN = {"": "", "none": "without a sandbox", "naive": "in a naive grader"}


def attack_table(attacks: Mapping) -> str:
    """The table, in Markdown: one row for each attack, in the order of the tests."""
    rows = ["| attack | tries to | scores 0, because | gets through |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {attack.tries} | `{attack.happens}` | {SEEN[attack.control]} |"
        for name, attack in attacks.items()
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Replace what stands between the two marks."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from rewards.attacks_forgery import ATTACKS

    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + attack_table(ATTACKS) + END + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
