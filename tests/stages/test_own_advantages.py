"""An advantage of a user's own gets what a built-in one gets: a critic, its place, its checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run

from posttrain.config import ConfigError
from posttrain.pipelines.audit import CHECKLIST, AuditFailed

MODULE = '''
import torch
from posttrain.algorithms.pieces import piece

@piece(needs={"token_rewards", "values"})
def monte_carlo(batch, *, scale: float = 1.0):
    """What the critic did not expect of the whole sequence."""
    values = batch.need("values").detach() * batch.active
    returns = batch.need("token_rewards").sum(1, keepdim=True) * batch.active
    return batch.replace(advantages=scale * (returns - values), returns=returns)

def undeclared(batch):
    """The same, and says nothing."""
    return monte_carlo(batch)

@piece(smallest_group=2, centred="group")
def not_centred(batch):
    """The reward of every token, with a claim that is not true of it."""
    return batch.replace(advantages=batch.need("rewards")[:, None] * batch.active + batch.active)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_advantages.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def run_with(folder: Path, **rl: Any) -> Any:
    done, _ = small_run(recipe(folder, sft=None, eval=None, rl={"steps": 2, **rl}))
    return done


def test_an_advantage_that_needs_values_gets_a_critic_and_runs(tmp_path: Path) -> None:
    advantage = {"name": "my_own_advantages:monte_carlo", "scale": 0.5}
    done = run_with(tmp_path / "run", advantage=advantage)
    losses = done.metrics().column("loss/value").to_pylist()
    assert len(losses) == 2
    assert losses[0] > losses[1] > 0  # every reward is −0.3, and the critic learns it


def test_an_advantage_that_does_not_say_so_is_told_what_to_declare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run_with(tmp_path / "run", advantage="my_own_advantages:undeclared", critic={})
    assert str(error.value) == (
        "rl.critic: no effect, because the advantage 'my_own_advantages:undeclared' asks for no "
        "values; drop it, or set rl.advantage to gae (the algorithm ppo does); if it reads values, "
        'declare it above the function: @piece(needs={"values"})'
    )


def test_an_advantage_that_says_it_is_centred_is_audited_for_it(tmp_path: Path) -> None:
    with pytest.raises(AuditFailed, match=f"step 1: broken: {CHECKLIST['normalised']}"):
        run_with(tmp_path / "run", advantage="my_own_advantages:not_centred", audit=True)
