"""The commands about Ray clusters: one for trying things on this machine, and what one has."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from posttrain.track.safe_terminal import say

clusters = typer.Typer(help="Ray clusters.", no_args_is_help=True)


@clusters.command()
def up(
    *,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, each with processes of its own.")] = 1,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs that each node claims; else its share.")
    ] = None,
) -> None:
    """Start a Ray cluster on this machine, for trying things; Ctrl-C ends it."""
    from posttrain.distributed.local_cluster import LocalCluster

    share = cpus or max(1, (os.cpu_count() or 1) // nodes)
    cluster = LocalCluster(nodes=nodes, cpus=share)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which takes them too
        signal.signal(number, lambda *_: ended.set())
    try:
        kind = f"{nodes} node{'s' * (nodes > 1)} of {share} CPU{'s' * (share > 1)}"
        say(f"a Ray cluster of {kind} listens on this machine only, at {cluster.address}")
        say(f'\n[cluster]\naddress = "{cluster.address}"\n')
        say(f"or: posttrain run RECIPE --cluster.address {cluster.address}; Ctrl-C ends it")
        ended.wait()
    finally:
        cluster.close()


@clusters.command()
def status(address: Annotated[str, typer.Argument(help="host:port of its head.")]) -> None:
    """What nodes a Ray cluster has, and what of them is free."""
    from posttrain.distributed.local_cluster import cluster_status

    for line in cluster_status(address):
        say(line)
