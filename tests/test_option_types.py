"""The options of the Python functions are typed: written from the sections, and mypy knows them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "typed_scripts"


def test_they_are_what_the_sections_say() -> None:
    """A key that is added or changed is added or changed there."""
    words = [sys.executable, str(ROOT / "scripts" / "option_types.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_strict_on_a_users_script() -> None:
    """Nothing to say of one that uses all there is; every misspelt or wrong option is found."""
    scripts = [SCRIPTS / "whole_interface.py", SCRIPTS / "mistakes.py"]
    options = ["--strict", "--follow-imports=silent", "--config-file=", "--no-error-summary"]
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'typed_scripts'}"
    words = [sys.executable, "-m", "mypy", *options, cache, *map(str, scripts)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    told = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert not [line for line in told if "whole_interface" in line], done.stdout + done.stderr
    found = {int(re.split(r"\.py:(\d+)", line)[1]): line for line in told}
    lines = scripts[1].read_text(encoding="utf-8").splitlines()
    marked = {n: line.split("  # error: ") for n, line in enumerate(lines, 1)}
    expected = {n: parts[1] for n, parts in marked.items() if len(parts) == 2}
    assert len(expected) == 10
    assert found.keys() >= expected.keys(), done.stdout
    assert [n for n, word in expected.items() if word not in found[n]] == []


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MYPYPATH": str(ROOT / "src")}
