"""What is wrong with a cluster is said before a run begins: the address, the room, the nodes."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from posttrain.config import ClusterSection, ConfigError, recipe_from_dict, resolve
from posttrain.distributed import ray_nodes, ray_start
from posttrain.distributed.connect import check_asked, connect
from posttrain.distributed.ray_cluster import make_bundles
from posttrain.distributed.ray_nodes import compare, wait_for_room
from posttrain.distributed.ray_start import LOCAL, check_address, explain
from posttrain.stages.run import run


def node(name: str, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name * 8,
        "Alive": True,
        "NodeManagerHostname": f"host-{name}",
        "NodeManagerAddress": "10.0.0.1",
        "Resources": resources,
    }


def ray_with(*seen: Sequence[dict[str, Any]]) -> Any:
    """A Ray that shows these nodes, look after look."""
    looks = list(seen)
    return SimpleNamespace(nodes=lambda: looks.pop(0) if len(looks) > 1 else looks[0])


def test_too_little_room_says_what_is_there_and_what_is_asked() -> None:
    ray = ray_with([node("a", CPU=2.0), node("b", CPU=1.0, GPU=1.0)])
    asked = [{"CPU": 2.0, "GPU": 1.0}] * 2
    with pytest.raises(ValueError, match="too little room") as caught:
        wait_for_room(ray, asked, deadline=60.0, may_join=False, say=lambda text: None)
    assert (
        "asks for 4 CPUs and 2 GPUs in 2 processes, and the 2 nodes there are have host-a at "
        "10.0.0.1 (aaaaaaaa): 2 CPUs and no GPU; host-b at 10.0.0.1 (bbbbbbbb): 1 CPU and 1 GPU."
    ) in str(caught.value)


def test_a_node_that_joins_late_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "LOOK", 0.0)
    first = [node("a", CPU=1.0)]
    said: list[str] = []
    ray = ray_with(first, first, [*first, node("b", CPU=1.0)])
    wait_for_room(ray, [{"CPU": 1.0}] * 2, deadline=600.0, may_join=True, say=said.append)
    assert "waiting up to 600 s for a node to join (cluster.deadline)" in said[0]
    assert said[1:] == [
        "cluster: node host-b at 10.0.0.1 (bbbbbbbb) has joined with 1 CPU and no GPU"
    ]


def test_a_node_that_never_joins_is_an_error_after_the_deadline() -> None:
    ray = ray_with([node("a", CPU=1.0)])
    with pytest.raises(ValueError, match=r"waited 0\.01 s for more: cluster\.deadline"):
        wait_for_room(ray, [{"CPU": 1.0}] * 2, deadline=0.01, may_join=True, say=lambda text: None)


def test_no_wait_where_there_is_room() -> None:
    wait_for_room(
        ray_with([node("a", CPU=2.0)]),
        [{"CPU": 1.0}] * 2,
        deadline=0.0,
        may_join=False,
        say=pytest.fail,
    )


HERE = {
    "python": "3.11.7",
    "posttrain": "1",
    "source": "abc",
    "torch": "2",
    "transformers": "5",
    "seen": "t",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "3.12.1"}, "node n has Python 3.12.1, and this process has 3.11.7; install th"),
        ({"posttrain": "0"}, "node n has posttrain 0, and this process has 1"),
        ({"posttrain": None}, "posttrain is not installed on node n; install posttrain"),
        ({"source": "abd"}, "node n has the code of posttrain abd, and this process has abc"),
        ({"seen": None}, "node n does not see the run folder /runs/mine; put run.folder on a file"),
        ({"seen": "other"}, "does not see the run folder"),
    ],
)
def test_a_node_with_something_else_is_named(change: dict[str, Any], message: str) -> None:
    found = {key: value for key, value in {**HERE, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(found, HERE, node="n", folder=Path("/runs/mine"))
    compare(HERE, HERE, node="n", folder=Path("/runs/mine"))


def test_a_dead_port_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        ValueError, match=rf"nothing answers at 127\.0\.0\.1:{port} \(Connection re"
    ):
        check_address(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "6379", "ray://head:10001", "http://head:8265", "head:", "head:99999"]
)
def test_what_is_no_address_is_said_with_one_that_is(address: str) -> None:
    with pytest.raises(ValueError, match=r'give "host:port" as ray start --head prints it'):
        check_address(address)


def test_a_port_of_something_else_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "ANSWERS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"listens at .* is not a Ray cluster.*1 s\); give"):
            check_address(address)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "posttrain\[cluster\]"'):
        ray_start.load_ray()


def test_what_ray_says_is_explained() -> None:
    text = "Version mismatch: The cluster was started with:\n Ray: 2.1\n This process:\n Ray: 2.60"
    assert "runs another Ray or Python than this process" in explain("a:1", RuntimeError(text))
    absent = RuntimeError("Can't find a node on this host")
    assert "this machine is not a node of the cluster at a:1" in explain("a:1", absent)


def resolved(**cluster: Any) -> Any:
    return resolve(recipe_from_dict({"task": "sort", "eval": {}, "cluster": cluster}))


def test_without_an_address_this_process_does_everything(tmp_path: Path) -> None:
    assert connect(resolved(), tmp_path) is None
    alone = resolve(recipe_from_dict({"task": "sort", "eval": {}}))
    assert connect(alone, tmp_path) is None


def test_several_ranks_need_an_address() -> None:
    with pytest.raises(ValueError, match=r"2 ranks are processes of their own; set cluster\.addr"):
        check_asked(resolved(learners=2))


def test_engines_need_an_address() -> None:
    with pytest.raises(ConfigError, match=r"engines are processes of a Ray cluster; set cluster"):
        resolved(engines=1)


@pytest.mark.parametrize("asked", [{"address": "127.0.0.1:1"}, {"learners": 2}])
def test_a_cluster_that_cannot_be_had_leaves_the_run_folder_alone(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    values = {"task": "sort", "eval": {}, "cluster": asked, "run": {"folder": str(folder)}}
    with pytest.raises(ValueError, match=r"nothing answers|processes of their own"):
        run(recipe_from_dict(values), console=Console(quiet=True))
    assert not folder.exists()


def test_places_are_apart_or_shared() -> None:
    section = ClusterSection(learners=2, engines=3, cpus_per_learner=1.0, cpus_per_engine=0.5)
    gpus = {"learner": 1.0, "engine": 0.0}
    apart = make_bundles(section, gpus)
    assert apart == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 0.5}] * 3
    shared = make_bundles(section.model_copy(update={"colocate": True}), gpus)
    assert shared == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.5, "GPU": 1.0}]


def test_ray_is_not_imported_before_it_is_asked_for() -> None:
    """Neither by a run without an address, nor by whoever only names the cluster's parts."""
    code = (
        "import sys\n"
        "import posttrain.stages.run, posttrain.cli.app, posttrain.distributed.connect\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cluster_of_our_own_that_others_may_reach_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **options: done.append("init"),
        nodes=lambda: [{"NodeManagerAddress": "10.0.0.1"}],
        shutdown=lambda: done.append("shutdown"),
        _private=SimpleNamespace(worker=SimpleNamespace()),
    )
    monkeypatch.setattr(ray_start, "load_ray", lambda: ray)
    monkeypatch.setattr(ray_start, "ONLY_HERE", {})
    monkeypatch.setattr(ray_start, "_reread", lambda: None)
    with pytest.raises(ValueError, match=r"started a cluster at 10\.0\.0\.1, where others may"):
        ray_start.init(LOCAL)
    assert done == ["init", "shutdown"]
