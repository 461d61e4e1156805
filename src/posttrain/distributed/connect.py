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


def connect(
    recipe: Resolved, folder: Path, *, say: Callable[[str], None] = warnings.warn
) -> Cluster | None:
    """The cluster of a recipe, or None where this process does everything.

    ``folder`` is the run folder, which all processes must see.
    """
    section = recipe.cluster
    if by_torchrun():
        from posttrain.distributed.torchrun import TorchrunCluster, meeting

        if section is not None and section.address is not None:
            raise ValueError(
                "cluster.address: names a Ray cluster, and torchrun has started this process; "
                "start it without torchrun, or drop cluster.address"
            )
        if (met := meeting()) is not None:
            return TorchrunCluster(recipe, folder, meeting=met)
    if section is None:
        return None
    if section.address is not None:
        from posttrain.distributed.ray_cluster import RayCluster

        spans = Spans() if recipe.run.trace else None
        return RayCluster(recipe, folder, spans=spans, say=say)
    if section.learners > 1 or section.engines:
        asked = f"{section.learners} learners and {section.engines} engines"
        raise ValueError(
            f'cluster: {asked} need other processes; set cluster.address ("local" starts a Ray '
            f"cluster for the run), or start the run by torchrun --nproc-per-node "
            f"{section.learners} for learners alone"
        )
    return None
