"""Writes the pages of docs/ that are made from the source: ``make pages``.

A test compares them with what this makes (tests/docs/test_pages.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from algorithm_pages import algorithm_pages
from algorithms_page import algorithms_page
from diagnosis_page import diagnosis_page

from posttrain.config.describe import tables
from posttrain.config.peers.option_names import LIBRARIES, WITHOUT
from posttrain.config.reference import configuration_page
from posttrain.config.sections import Recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_PLACE = re.compile(r"(<!-- (options of (\w+)|without): [^\n]*-->\n).*?(<!-- end -->)", re.S)


def written_pages() -> dict[Path, str]:
    """Every page that is made, whole or in part, with the text that it should have."""
    made = {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "algorithms.md": algorithms_page(),
        DOCS / "diagnosis.md": diagnosis_page(),
        **{DOCS / "algorithms" / name: text for name, text in algorithm_pages().items()},
    }
    for name in ("from_trl.md", "from_verl.md"):
        made[DOCS / name] = with_tables((DOCS / name).read_text(encoding="utf-8"))
    return made


def with_tables(text: str) -> str:
    """A page with the tables of names at the places that are marked for them.

    >>> print(with_tables("<!-- options of verl: by -->\\n<!-- end -->").splitlines()[3])
    | `rollout_n` | `rl.group_size`, or `prefer.samples` |
    """

    def table(found: re.Match[str]) -> str:
        rows = options_table(found[3]) if found[3] else without_table()
        return "\n".join([found[1].rstrip("\n"), *rows, found[4]])

    return _PLACE.sub(table, text)


def options_table(library: str) -> list[str]:
    """What the options of a library are called here, in Markdown."""
    names = {**LIBRARIES[library], **(LIBRARIES[""] if library == "TRL" else {})}
    rows = [f"| `{theirs}` | {_here(ours)} |" for theirs, ours in names.items()]
    return [f"| {library} | here |", "|---|---|", *rows]


def without_table() -> list[str]:
    """The options that have no counterpart, and why."""
    return [
        "| option | |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in WITHOUT.items()),
    ]


def _here(ours: str) -> str:
    """A name of the table as a reader writes it, with the first section that has it."""
    first, *others = ours.split("|")
    texts = [_keys(first, ("rl", "adapter", "dpo", "sft"))]
    texts += [_keys(other, ("sft", "prefer", "rl", "adapter")) for other in others]
    return ", or ".join(dict.fromkeys(texts))


def _keys(names: str, sections: tuple[str, ...]) -> str:
    known = dict(tables())
    found = []
    for name in names.split(" and "):
        top = name.partition(".")[0]
        homes = [each for each in sections if top in known[each].model_fields]
        whole = f"{homes[0]}.{name}" if homes and top not in Recipe.model_fields else name
        found.append(f"`{whole}`")
    return " and ".join(found)


def main() -> None:
    """Write what has changed."""
    (DOCS / "algorithms").mkdir(exist_ok=True)
    for path, text in written_pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
