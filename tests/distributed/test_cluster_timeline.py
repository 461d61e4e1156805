"""A run on a Ray cluster of its own: what one sees of it, and what a plan makes of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from faults.ray_processes import until
from small_runs import recipe, small_run
from trace_format import check_format

from posttrain.distributed.engine_pool import EnginePool
from posttrain.distributed.plans.run_costs import from_run

pytestmark = pytest.mark.cluster

CLUSTER = {"address": "local", "engines": 2, "cpus_per_engine": 0.5, "cpus_per_learner": 0.5}


def test_a_timeline_has_a_row_for_every_process_and_metrics_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = EnginePool.push

    def pushed(self: EnginePool, *given: Any) -> None:
        """The second engine may be long in coming: without it there is no row of it."""
        push(self, *given)
        until(lambda: all(each.state == "up" for each in self._members), why="both serve")

    monkeypatch.setattr(EnginePool, "push", pushed)
    given = recipe(
        tmp_path / "run", sft=None, eval=None, rl={"steps": 6, "max_lag": 1}, cluster=CLUSTER
    )
    given["run"]["trace"] = True
    done, _ = small_run(given)
    stage = done.folder.stage("rl")
    rows = check_format(json.loads((stage.path / "trace.json").read_text()))
    names = {row: {event["name"] for event in events} for row, events in rows.items()}
    assert {"driver", "learner", "engine 0", "engine 1", "grading"} <= set(names)
    assert {f"step {step}" for step in range(1, 7)} < names["driver"] | names["driver (2)"]
    assert {"sampling", "sync"} <= names["engine 0"] | names["engine 1"]
    records = stage.records()
    assert all(0 <= record["cluster/learner_idle"] <= 1 for record in records)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    logged = {
        re.sub(r"engine_\d+", "engine_0", name)
        for record in records
        for name in record
        if name.startswith("cluster/")
    }
    assert len(logged) > 5
    assert logged <= set(re.findall(r"^\| `([^`]+)`", page, re.M))
    # What was spent on two engines is counted as such.
    assert from_run(done.folder.path).costs.decode(4) > 0
