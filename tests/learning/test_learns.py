"""Small tasks must be learned: reinforcement learning finds out what the demonstrations got wrong.

The answer is what comes after the last digit. Half of the demonstrations are wrong: the warmed-up
model knows what an answer looks like, and is seldom right. The rest comes from rewards alone.
"""

from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, small_run

from posttrain.build.setup import Supplied
from posttrain.stages.results import Run
from posttrain.tasks import PromptTask
from posttrain.types import Prompt

WARM_UP = {"wrong_share": 0.5, "epochs": 25, "batch_size": 20, "learning_rate": 1e-2}
RL = {
    "steps": 40,
    "prompts_per_step": 16,
    "group_size": 8,
    "max_new_tokens": 3,
    "kl": {"placement": "none"},
}


def next_digit() -> PromptTask:
    """Every pair of digits, a fifth of them held out."""

    def prompt(a: int, b: int) -> Prompt:
        columns = {"answer": str((b + 1) % 10)}
        return Prompt(id=f"{a}{b}", text=f"{a} {b}", columns=columns)

    pairs = [(a, b) for a in range(10) for b in range(10)]
    return PromptTask(
        name="next_digit",
        rewards={"exact": 1.0},
        train=tuple(prompt(a, b) for a, b in pairs if (a + b) % 5),
        test=tuple(prompt(a, b) for a, b in pairs if not (a + b) % 5),
        solve=lambda prompt: prompt.columns["answer"],
    )


def learn(folder: Path, *, compiled: bool = False, **rl: Any) -> Run:
    """Warm up and learn; sampled and greedy answers to held-out problems before and after."""
    given = {
        "run": {"folder": str(folder), "seed": 0},
        "model": {"name": "tiny", "options": TINY, "chat": False, "compile": compiled},
        "sft": WARM_UP,
        "rl": {**RL, **rl},
        "eval": {"problems": 20, "samples": 8},
    }
    return small_run(given, supplied=Supplied(task=next_digit()))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "grpo", "epochs": 2, "minibatches": 2, "learning_rate": 3e-3},
        {"algorithm": "reinforce_baseline", "learning_rate": 4e-3},
        {"algorithm": "ppo", "epochs": 2, "minibatches": 2, "learning_rate": 2e-3},
        {"algorithm": "ppo_penalty", "epochs": 2, "minibatches": 2, "learning_rate": 2e-3},
        {"algorithm": "ppo", "epochs": 2, "learning_rate": 4e-3, "critic": {"kind": "shared"}},
        {"algorithm": "grpo", "minibatches": 2, "learning_rate": 3e-3, "max_lag": 1},
    ],
    ids=["grpo", "reinforce_baseline", "ppo", "ppo_penalty", "ppo_shared", "grpo_ahead"],
)
def test_rewards_teach_what_demonstrations_did_not(tmp_path: Path, rl: dict[str, Any]) -> None:
    """Sampled answers to held-out questions: mostly wrong before, mostly right after."""
    run = learn(tmp_path / "run", **rl)
    before, after = (run.summary[when]["mean@8"]["value"] for when in ("before", "after"))
    assert before < 0.4
    assert after > before + 0.4
    rewards = run.metrics()["reward/mean"].to_pylist()[1:]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.25
