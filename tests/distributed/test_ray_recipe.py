"""A recipe with engines on a Ray of its own: the same rollouts, though one is killed meanwhile."""

import threading
import time
from pathlib import Path

import pytest
from faults.ray_processes import actors, kill
from small_runs import recipe, same_weights, small_run

from posttrain.runs import read_rollouts
from posttrain.runs.ledger import read_ledger

pytestmark = pytest.mark.cluster

CLUSTER = {"address": "local", "engines": 2, "cpus_per_engine": 0.5, "cpus_per_learner": 0.5}


def killed_once(done: threading.Event, folder: Path) -> None:
    """End an engine once the run has learned a step."""
    while not done.is_set():
        ledger = folder / "rl" / "ledger.jsonl"
        if ledger.exists() and b"trained" in ledger.read_bytes():
            done.set()
            kill(actors("EngineHost")[0])
        time.sleep(0.02)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_recipe_learns_the_same_with_engines_elsewhere(tmp_path: Path, max_lag: int) -> None:
    rl = {"steps": 12, "max_lag": max_lag, "evaluate_every": 4, "evaluate_problems": 4}
    small_run(recipe(tmp_path / "here", rl=rl))
    done = threading.Event()
    killer = threading.Thread(target=killed_once, args=(done, tmp_path / "there"))
    killer.start()
    try:
        there, _ = small_run(recipe(tmp_path / "there", rl=rl, cluster=CLUSTER))
    finally:
        done.set()
        killer.join()
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
    assert "2 engines: slots" in there.folder.stage("rl").ways.read_text()
