"""docs/tutorial.md as a newcomer goes through it: its files are written, its commands are run."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from command_line import command_in

from posttrain.config import read_recipe, resolve

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.S | re.M)
NOT_RUN = re.compile(r"<!-- not run: .+? -->\s*\Z", re.S)


@pytest.mark.slow
def test_the_tutorial_goes_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one empty folder; the job is learned, and the model comes out and answers."""
    posttrain = command_in(tmp_path, columns=100, monkeypatch=monkeypatch, capsys=capsys)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    text, said = PAGE.read_text(encoding="utf-8"), {}
    for found in BLOCK.finditer(text):
        language, title, body = found.groups()
        if title:
            Path(title).write_text(body, encoding="utf-8")
        elif language == "bash" and not NOT_RUN.search(text[: found.start()]):
            for line in body.splitlines():
                program, *words = shlex.split(line, comments=True)
                if program == "python":
                    runpy.run_path(words[0], run_name="__main__")
                    said[line] = capsys.readouterr().out
                else:
                    result = posttrain(*words)
                    assert result.code == 0, (line, result.err)
                    said[line] = result.out
    assert "groups with signal" in said["posttrain check first.toml"]
    assert "nothing to learn from" in said["posttrain run first.toml --rl.steps 8"]
    summary = json.loads(Path("runs/largest/summary.json").read_text(encoding="utf-8"))
    assert summary["accuracy_before"] < 0.6
    assert summary["accuracy_after"] > 0.8
    assert said["python out.py"].strip() == "7"
    assert Path("largest.html").stat().st_size > 100_000
    resolve(read_recipe(Path("real.toml")))
