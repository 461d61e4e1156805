"""A game of several turns must be learned: the policy has to heed what the environment answers.

A number from 1 to 3, and two guesses. The demonstrations guess 2, and then at random whatever the
answer was. Two guesses that pay no heed to it find two numbers of three at most.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, small_run

from posttrain.envs.guess_number import Guessing, GuessNumber
from posttrain.tasks.demonstrations import played
from posttrain.types import Prompt

WITHOUT_ANSWERS = 2 / 3
"""The most that can be found by guesses which pay no heed to the answers."""
RANGE = {"maximum": 3, "smallest": 3, "template": "{low}-{high}", "num_train": 3, "num_test": 0}


def demonstrations(path: Path) -> str:
    """Every game that begins with 2 and does not end with it: the path of a file of them."""
    rows = []
    for secret, second in itertools.product((1, 3), "123"):

        def guess(state: Guessing, second: str = second) -> str:
            return second if state.guesses else "2"

        columns = {"low": 1, "high": 3, "secret": secret}
        prompt = Prompt(id=f"{secret} {second}", text="1-3", columns=columns)
        rows.append({"messages": played(GuessNumber(), prompt, player=guess)})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def recipe(folder: Path) -> dict[str, Any]:
    """Games as demonstrated first, then rewards alone."""
    return {
        "run": {"folder": str(folder), "seed": 0, "deterministic": True, "stages": ["sft", "rl"]},
        "model": {"name": "tiny", "options": {**TINY, "chat": True}},
        "task": {"name": "guess_number", "env": "guess_number", **RANGE},
        "environment": {"workers": 0},
        "sft": {
            "data": demonstrations(folder.with_suffix(".jsonl")),
            "epochs": 40,
            "batch_size": 6,
            "learning_rate": 1e-2,
        },
        "rl": {
            "algorithm": "grpo",
            "steps": 80,
            "prompts_per_step": 3,
            "group_size": 16,
            "max_new_tokens": 1,  # a digit: who ends a turn, and how, earns nothing here
            "epochs": 2,
            "minibatches": 2,
            "learning_rate": 2e-3,
            "kl": {"placement": "none"},
            "engine": "transformers",
            "evaluate_every": 0,
            "check": "off",
        },
    }


@pytest.mark.slow
def test_a_policy_learns_to_heed_the_answers(tmp_path: Path) -> None:
    """Sampled games, 48 a step: the share of numbers that are found."""
    run, _ = small_run(recipe(tmp_path / "run"))
    found = run.metrics()["reward/mean"].to_pylist()
    assert sum(found[:5]) / 5 < WITHOUT_ANSWERS
    assert sum(found[-10:]) / 10 > WITHOUT_ANSWERS + 0.15
