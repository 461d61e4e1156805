"""A Ray cluster of several nodes on this machine, for trying what runs on real ones."""

from __future__ import annotations

import logging
import os
from typing import Any

from posttrain.distributed.ray_nodes import amounts, node_name
from posttrain.distributed.ray_start import (
    ONLY_HERE,
    STORE,
    THIS_MACHINE,
    check_only_here,
    init,
    load_ray,
)


class LocalCluster:
    """Nodes that listen on this machine only, with a small object store each and no dashboard."""

    def __init__(self, *, nodes: int, cpus: int) -> None:
        os.environ.update(ONLY_HERE)
        load_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.cluster_utils import Cluster

        tokens.enable_token_auth_by_default()  # as ray.init does for a cluster of its own
        tokens.ensure_token_if_auth_enabled()
        self._cluster: Any = Cluster()
        try:
            for _ in range(nodes):
                check_only_here([self.add_node(cpus=cpus).node_ip_address])
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What a recipe names in cluster.address."""
        return str(self._cluster.address)

    def add_node(self, *, cpus: int) -> Any:
        """One node more; it can be handed to :meth:`remove_node`."""
        own = {"include_dashboard": False} if self._cluster.head_node is None else {}
        return self._cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE, node_ip_address=THIS_MACHINE, **own
        )

    def remove_node(self, node: Any) -> None:
        """Kill a node with all that runs on it, as a power cut would."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def cluster_status(address: str) -> list[str]:
    """The nodes of a cluster and what of them is free, in lines."""
    ray = init(address)
    try:
        nodes, free = ray.nodes(), ray.available_resources()
        lines = [
            f"{node_name(node)}: {amounts(node['Resources']) if node['Alive'] else 'gone'}"
            for node in nodes
        ]
        return [*lines, f"free: {amounts(free)} of {amounts(ray.cluster_resources())}"]
    finally:
        ray.shutdown()
