"""The pages link as files do; the site has the same links as addresses, and knows a broken one."""

import logging
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/posttrain/posttrain"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "site" / "site_hooks.py"))


@pytest.mark.parametrize(
    ("uri", "written", "shown"),
    [
        (
            "a.md",
            "[l](../src/posttrain/api.py#L3)",
            f"{REPOSITORY}/blob/main/src/posttrain/api.py#L3",
        ),
        ("a.md", "[l](../recipes)", f"{REPOSITORY}/tree/main/recipes"),
        ("algorithms/a.md", "[l](../../README.md)", f"{REPOSITORY}/blob/main/README.md"),
        ("a.md", "[l](../notebooks/own_data.ipynb)", "notebooks/own_data.md"),
        ("notebooks/own_data.md", "[l](../docs/data.md#columns)", "../data.md#columns"),
        ("a.md", "[l](data.md#columns)", "data.md#columns"),
        ("a.md", "[`x[0]`](../Makefile)", f"{REPOSITORY}/blob/main/Makefile"),
        ("a.md", "[l](https://arxiv.org)", "https://arxiv.org"),
    ],
)
def test_a_link_as_the_site_has_it(
    hooks: dict[str, Any], uri: str, written: str, shown: str
) -> None:
    text, lost = hooks["relinked"](written, uri, source=hooks["source_of"](uri))
    assert re.search(r"\]\((.*)\)$", text)[1] == shown  # type: ignore[index]
    assert lost == []


def test_code_is_left_alone(hooks: dict[str, Any]) -> None:
    page = "`[a](../none.py)`\n\n```python\nx = y[0](../none)\n```\n"
    assert hooks["relinked"](page, "a.md", source=ROOT / "docs/a.md") == (page, [])


def test_a_link_to_nothing_is_a_warning_that_fails_the_strict_build(
    hooks: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="data.md"))
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        hooks["on_page_markdown"]("[gone](../src/gone.py)", page=page)
    assert "data.md: the link ../src/gone.py leads to no file" in caplog.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(hooks: dict[str, Any], page: Path) -> None:
    """Without the site's tools: `make site` looks at anchors as well."""
    text = page.read_text(encoding="utf-8")
    for found in hooks["_LINK"].finditer(text):
        target = found[1] and found[1].partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target
