"""A recipe with engines on a Ray of its own: the same rollouts, though one is killed meanwhile."""

from pathlib import Path
from typing import Any

import pytest
from faults.ray_processes import kill, until
from ledger_account import read_ledger
from small_runs import recipe, same_weights, small_run

from posttrain.distributed.engine_pool import EnginePool
from posttrain.runs import read_rollouts

pytestmark = pytest.mark.cluster

CLUSTER = {"address": "local", "engines": 2, "cpus_per_engine": 0.5, "cpus_per_learner": 0.5}


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines serve from the first update on, and with the sixth one is ended."""
    push = EnginePool.push

    def pushed(self: EnginePool, learner: Any, version: int) -> None:
        push(self, learner, version)
        if version == 1:
            until(lambda: all(each.state == "up" for each in self._members), why="both serve")
        if version == 6:
            assert kill(self._members[0].facts["pid"])

    monkeypatch.setattr(EnginePool, "push", pushed)


@pytest.mark.usefixtures("kills")
@pytest.mark.parametrize(
    ("max_lag", "adapter"), [(0, {}), (1, {}), (0, {"rank": 4})], ids=["0", "1", "adapter"]
)
def test_a_recipe_learns_the_same_with_engines_elsewhere(
    tmp_path: Path, max_lag: int, adapter: dict[str, Any]
) -> None:
    rl = {"steps": 12, "max_lag": max_lag, "evaluate_every": 4, "evaluate_problems": 4}
    small_run(recipe(tmp_path / "here", rl=rl, adapter=adapter))
    there, _ = small_run(recipe(tmp_path / "there", rl=rl, cluster=CLUSTER, adapter=adapter))
    one, other = (tmp_path / name / "rl" for name in ("here", "there"))
    tokens = [
        [
            (row["prompt_id"], row["completion_tokens"], row["version"])
            for row in read_rollouts(each)
        ]
        for each in (one / "rollouts", other / "rollouts")
    ]
    assert tokens[0] == tokens[1]
    if not max_lag:  # else the correction takes the sampler's log-probs, which round differently
        assert same_weights(one / "model", other / "model")
    last = there.folder.stage("rl").records()[-1]
    assert last["cluster/engine_restarts"] >= 1
    account = read_ledger(other)
    assert (account.trained, account.problems) == (48, ())
    assert account.engines == ("engine 0", "engine 1")
    assert "2 engines: continuous batching" in there.folder.stage("rl").ways.read_text()
