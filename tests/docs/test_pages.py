"""Pages that are made from the source are what it makes today: `make pages` writes them."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.algorithms.table import ALGORITHMS
from posttrain.config.peers.option_names import LIBRARIES, WITHOUT

ROOT = Path(__file__).parents[2]
SITE = ROOT / "scripts" / "site"


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    made: dict[Path, str] = runpy.run_path(str(SITE / "write_pages.py"))["written_pages"]()
    return made


def test_every_page_is_up_to_date(pages: dict[Path, str]) -> None:
    old = [
        path.name
        for path, text in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert old == [], "run: make pages"


def test_every_algorithm_has_a_page_and_no_other_is_there(pages: dict[Path, str]) -> None:
    folder = ROOT / "docs" / "algorithms"
    assert {path.stem for path in folder.glob("*.md")} == ALGORITHMS.keys()
    for name, row in ALGORITHMS.items():
        text = pages[folder / f"{name}.md"]
        assert row.equation in text
        assert f"--rl.algorithm {name} " in text
        assert all(f"]({other}.md)" in text for other in row.neighbours)


def test_every_name_of_a_peer_is_on_its_page(pages: dict[Path, str]) -> None:
    trl, verl = (pages[ROOT / "docs" / f"from_{name}.md"] for name in ("trl", "verl"))
    for library, page in {"TRL": trl, "verl": verl, "OpenRLHF": verl, "": trl}.items():
        assert [name for name in LIBRARIES[library] if f"| `{name}` | `" not in page] == []
    assert [name for name in WITHOUT if f"| `{name}` | " not in trl] == []


def test_the_api_pages_have_what_the_packages_name() -> None:
    script = runpy.run_path(str(SITE / "api_pages.py"))
    made = script["api_pages"](ROOT / "src" / "posttrain")
    assert "::: posttrain.rl\n" in made["api/index.md"]
    assert "::: posttrain.types.Rollout\n" in made["api/types.md"]
    assert "::: posttrain.protocols.Engine\n" in made["api/protocols.md"]
    assert "::: posttrain.algorithms.group_normalised\n" in made["api/algorithms.md"]
    assert not any("__version__" in text for text in made.values())


def test_a_docstring_becomes_markdown() -> None:
    pytest.importorskip("griffe")
    as_markdown = runpy.run_path(str(SITE / "docstring_text.py"))["as_markdown"]
    text = "Adds :func:`a.b`.\n\n====  ===\n``x``  what\n====  ===\n\n>>> b(1)\n2"
    assert as_markdown(text) == (
        "Adds `a.b`.\n\n```text\nx  what\n```\n\n```pycon\n>>> b(1)\n2\n```"
    )


@pytest.mark.slow
def test_the_metrics_of_each_algorithm_are_those_that_its_command_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs every command of these pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    script: dict[str, Any] = runpy.run_path(str(SITE / "algorithm_pages.py"))
    recorded = json.loads((SITE / "algorithm_metrics.json").read_text(encoding="utf-8"))
    assert script["measured_metrics"]() == recorded, "run: python scripts/site/algorithm_pages.py"
