"""From ``[cluster]`` to the processes that it asks for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from posttrain.build.cluster import Cluster
from posttrain.config import Resolved
from posttrain.distributed.spans import Spans


def by_torchrun() -> bool:
    """Whether torchrun has started this process, together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_asked(recipe: Resolved) -> None:
    """Refuse a cluster that cannot be had, before anything in the run folder is touched."""
    section = recipe.cluster
    if section is None:
        return
    if section.address is None and section.learners > 1 and not by_torchrun():
        raise ValueError(
            f"cluster.learners: {section.learners} ranks are processes of their own; set "
            'cluster.address ("local" starts a Ray cluster for the run), or start the run by '
            f"torchrun --nproc-per-node {section.learners} -m posttrain run …"
        )
    if section.address is not None and by_torchrun():
        raise ValueError(
            "cluster.address: names a Ray cluster, and torchrun has started this process; "
            "start it without torchrun, or drop cluster.address"
        )
    if section.address not in (None, "local"):
        from posttrain.distributed.ray_start import reach

        reach(section.address)


def connect(
    recipe: Resolved, folder: Path, *, say: Callable[[str], None] = warnings.warn
) -> Cluster | None:
    """The cluster of a recipe that :func:`check_asked` let pass, or None: this process alone.

    ``folder`` is the run folder, which all processes must see.
    """
    section = recipe.cluster
    if by_torchrun():
        from posttrain.distributed.torchrun import TorchrunCluster, meeting

        if (met := meeting()) is not None:
            return TorchrunCluster(recipe, folder, meeting=met)
    if section is None or section.address is None:
        return None
    from posttrain.distributed.ray_cluster import RayCluster

    spans = Spans() if recipe.run.trace else None
    return RayCluster(recipe, folder, spans=spans, say=say)
