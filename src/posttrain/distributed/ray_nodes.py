"""The nodes of a Ray cluster: is there room for all, and does every node see what this one sees."""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.build.fingerprint import code_version

Bundle = dict[str, float]
"""What one process takes: ``{"CPU": 1.0, "GPU": 1.0}``; what it takes none of is left out."""
Say = Callable[[str], None]
KINDS = ("CPU", "GPU")
LOOK = 0.5  # seconds between two looks at who has joined


def node_name(node: Mapping[str, Any]) -> str:
    """A node in words: its host, its address and the beginning of its number."""
    where = f"{node['NodeManagerHostname']} at {node['NodeManagerAddress']}"
    return f"{where} ({node['NodeID'][:8]})"


def alive(ray: Any) -> list[dict[str, Any]]:
    """The nodes that are there."""
    return [node for node in ray.nodes() if node["Alive"]]


def fits(bundles: Iterable[Bundle], nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether every bundle finds a node with room, the largest first.

    >>> fits([{"CPU": 1}, {"CPU": 1}], [{"CPU": 1}]), fits([{"CPU": 1}] * 2, [{"CPU": 1}] * 2)
    (False, True)
    """
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: sorted(bundle.values()), reverse=True):
        home = next((n for n in free if all(n.get(k, 0.0) >= v for k, v in bundle.items())), None)
        if home is None:
            return False
        for kind, amount in bundle.items():
            home[kind] -= amount
    return True


def wait_for_room(
    ray: Any, bundles: Sequence[Bundle], *, deadline: float, may_join: bool, say: Say
) -> None:
    """Return once the nodes that are there have room for all; raise where they have not in time.

    Where no node can join, at once.
    """
    until = time.monotonic() + (deadline if may_join else 0.0)
    known: set[str] | None = None
    while True:
        nodes = {node["NodeID"]: node for node in alive(ray)}
        new = [] if known is None else [node for key, node in nodes.items() if key not in known]
        for node in new:
            say(f"cluster: node {node_name(node)} has joined with {amounts(node['Resources'])}")
        if fits(bundles, (node["Resources"] for node in nodes.values())):
            return
        if time.monotonic() >= until:
            waited = f" (waited {deadline:g} s for more: cluster.deadline)" if may_join else ""
            raise ValueError(_too_little(bundles, list(nodes.values())) + waited)
        if known is None:
            there = _too_little(bundles, list(nodes.values()))
            say(f"{there}; waiting up to {deadline:g} s for a node to join (cluster.deadline)")
        known = set(nodes)
        time.sleep(LOOK)


def _too_little(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]]) -> str:
    asked = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in KINDS}
    there = "; ".join(f"{node_name(node)}: {amounts(node['Resources'])}" for node in nodes)
    num = len(nodes)
    return (
        f"cluster: too little room: the recipe asks for {amounts(asked)} in {len(bundles)} "
        f"process{'es' if len(bundles) > 1 else ''}, and the {num} node{'s' if num > 1 else ''} "
        f"there {'are have' if num > 1 else 'is has'} {there}. Lower cluster.learners, "
        "cluster.engines or what each takes (cluster.cpus_per_learner may be 0.5), or add nodes"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Of CPUs and GPUs, in words.

    >>> amounts({"CPU": 2.0, "GPU": 0.0, "memory": 1.0})
    '2 CPUs and no GPU'
    """
    cpus, gpus = (resources.get(kind, 0.0) for kind in KINDS)
    told = "no GPU" if not gpus else f"{gpus:g} GPU{'s' if gpus != 1 else ''}"
    return f"{cpus:g} CPU{'s' if cpus != 1 else ''} and {told}"


def check_nodes(ray: Any, ids: Iterable[str], *, scratch: Path, deadline: float) -> None:
    """Raise where a node has other software, or does not see the run folder."""
    scratch.mkdir(parents=True, exist_ok=True)
    token, path = uuid.uuid4().hex, scratch / "seen"
    path.write_text(token)

    def look(path: str) -> dict[str, Any]:
        """Runs on the node, by value: posttrain may not be there."""
        import contextlib
        import platform

        found: dict[str, Any] = {"python": platform.python_version()}
        with contextlib.suppress(Exception):
            from posttrain.build.fingerprint import code_version

            found |= code_version()
        with contextlib.suppress(OSError), open(path) as file:
            found["seen"] = file.read()
        return found

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {
        key: ray.remote(num_cpus=0, max_retries=0)(look)
        .options(scheduling_strategy=strategy(key, soft=False))
        .remote(str(path.absolute()))
        for key in dict.fromkeys(ids)
    }
    names = {node["NodeID"]: node_name(node) for node in alive(ray)}
    here = {"python": platform.python_version(), **code_version(), "seen": token}
    for key, answer in asked.items():
        name = names.get(key, key[:8])
        try:
            found = ray.get(answer, timeout=deadline)
        except ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"cluster: node {name} starts no process within {deadline:g} s (cluster.deadline)"
            ) from None
        except ray.exceptions.RayError as error:
            raise ValueError(f"cluster: node {name} cannot be asked: {error}") from error
        compare(found, here, node=name, folder=scratch.parent)
    path.unlink()


def compare(found: Mapping[str, Any], here: Mapping[str, Any], *, node: str, folder: Path) -> None:
    """Raise where a node reports something else than there is here."""
    if "posttrain" not in found:
        raise ValueError(
            f"cluster: posttrain is not installed on node {node}; install posttrain {__version__} "
            "there, in the environment that ray start runs in"
        )
    words = {"python": "Python", "source": "the code of posttrain"}
    for key in ("python", "posttrain", "source", "torch", "transformers"):
        if found.get(key) != here[key]:
            raise ValueError(
                f"cluster: node {node} has {words.get(key, key)} {found.get(key)}, and this "
                f"process has {here[key]}; install the same everywhere, or results would differ"
            )
    if found.get("seen") != here["seen"]:
        raise ValueError(
            f"cluster: node {node} does not see the run folder {folder.absolute()}; put run.folder "
            "on a file system that every node has at the same path"
        )
