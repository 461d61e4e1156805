"""docs/errata.md and the tables above the document tests name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ERRATA = HERE.parent / "docs" / "errata.md"
FILES = sorted((HERE / "algorithms").glob("test_documents_*.py"))


def names_in(path: Path) -> list[str]:
    """Names of the test functions in a file."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def test_every_test_named_in_the_errata_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", ERRATA.read_text(encoding="utf-8")))
    known = {name for path in FILES for name in names_in(path)}
    assert len(named) > 30
    assert named - known == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_of_a_table_names_a_test_and_every_test_has_a_row(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    rows = re.findall(r"\S {2,}([a-z][a-z0-9_]+)$", docstring, flags=re.MULTILINE)
    rows = {f"test_{row}" for row in rows if row != "test"}
    names = names_in(path)
    assert [row for row in sorted(rows) if not any(name.startswith(row) for name in names)] == []
    assert [name for name in names if not any(name.startswith(row) for row in rows)] == []
