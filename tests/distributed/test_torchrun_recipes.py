"""What a recipe must not ask of torchrun: each is refused at the start, and says what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import recipe

from posttrain.config import Resolved, recipe_from_dict, resolve
from posttrain.distributed.connect import check_asked, connect
from posttrain.distributed.torchrun import TorchrunCluster
from posttrain.learn.ranks import Ranks


def resolved(folder: Path, **cluster: Any) -> Resolved:
    return resolve(recipe_from_dict(recipe(folder, cluster=cluster)))


def test_other_processes_than_there_are(tmp_path: Path) -> None:
    meeting: Any = SimpleNamespace(ranks=Ranks(rank=0, size=2))
    words = "3 asked for, and torchrun has started 2 ranks; give --nproc-per-node 3"
    with pytest.raises(ValueError, match=words):
        TorchrunCluster(resolved(tmp_path, learners=3), tmp_path, meeting=meeting)


def test_a_ray_cluster_beside_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun, or drop"):
        check_asked(resolved(tmp_path, address="local"))
    monkeypatch.setenv("WORLD_SIZE", "1")  # one process is an ordinary run
    assert connect(resolved(tmp_path), tmp_path) is None
