"""scripts/lines.py counts what it says."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "lines.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_files_and_lines_by_package(script: dict[str, Any], tmp_path: Path) -> None:
    files = {"a.py": 2, "data/b.py": 3, "data/deep/c.py": 4, "sandbox/d.py": 5, "data/e.txt": 9}
    for name, lines in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * lines)
    counts = script["count"](tmp_path)
    assert counts == {"(root)": (1, 2), "data": (2, 7), "sandbox": (1, 5)}
    told = script["table"]({"then": {"gone": (1, 1)}, "here": counts})
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines()}
    assert rows["package"] == ["then", "here"]
    assert rows["gone"] == ["1", "1", "0", "0"]
    assert rows["core"] == ["1", "1", "3", "9"]
    assert rows["all"] == ["1", "1", "4", "14"]
