"""Small tasks must be learned on a GPU too: compiled, captured and run ahead."""

from pathlib import Path
from typing import Any

import pytest
from learning.test_learns import learn

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "grpo", "epochs": 2, "minibatches": 2, "learning_rate": 3e-3},
        {"algorithm": "ppo", "epochs": 2, "minibatches": 2, "learning_rate": 2e-3},
        {"algorithm": "grpo", "minibatches": 2, "learning_rate": 3e-3, "max_lag": 1},
    ],
    ids=["grpo", "ppo", "grpo_ahead"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_rewards_teach(tmp_path: Path, rl: dict[str, Any], compiled: bool) -> None:
    """Sampled answers to held-out questions, and what the engine said beside the learner."""
    run = learn(tmp_path / "run", compiled=compiled, **rl)
    before, after = (run.summary[when]["mean@8"]["value"] for when in ("before", "after"))
    assert before < 0.4
    assert after > before + 0.4
    if "max_lag" not in rl:
        mismatch = run.metrics()["mismatch/mean"].to_pylist()[1:]
        assert max(mismatch) < 0.02
