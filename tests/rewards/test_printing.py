"""A reward that prints: in a worker to stderr, and ``check --json`` is JSON all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rewards.mishaps import Pooled, rollouts
from small_runs import recipe

from posttrain.config import recipe_from_dict, to_toml

MAIN = "from posttrain.cli import main; main()"
PRINTS = """
print("on import")

def reward(completion):
    print("on a completion")
    return float(len(completion))
"""


def test_what_a_reward_prints_goes_to_stderr(
    pooled: Pooled, capfd: pytest.CaptureFixture[str]
) -> None:
    def reward(n: int) -> float:
        print("by python")
        os.write(1, b"by the system\n")
        subprocess.run(["echo", "by a child"], check=True)
        return 1.0

    assert pooled(reward).score(rollouts(1))[0].ok
    out, err = capfd.readouterr()
    assert out == ""
    assert set(err.splitlines()) == {"by python", "by the system", "by a child"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_check_as_json_is_nothing_but_json(workers: int, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(PRINTS)
    given = recipe(tmp_path / "run", sft=None, eval=None, grading={"workers": workers})
    given["rewards"] = {"loud:reward": 1.0}
    (tmp_path / "loud.toml").write_text(to_toml(recipe_from_dict(given)))
    command = [sys.executable, "-c", MAIN, "check", "loud.toml", "--fast", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "broken scores" in {line["name"] for line in json.loads(done.stdout)["lines"]}
    assert {"on import", "on a completion"} <= set(done.stderr.splitlines())
