"""From ``[cluster]`` to the processes that it asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from posttrain.build.cluster import Cluster
from posttrain.config import Resolved


def connect(
    recipe: Resolved, folder: Path, *, say: Callable[[str], None] = warnings.warn
) -> Cluster | None:
    """The cluster of a recipe, or None where this process does everything.

    ``folder`` is the run folder, which all processes must see.
    """
    section = recipe.cluster
    if section is None:
        return None
    if section.address is not None:
        from posttrain.distributed.ray_cluster import RayCluster

        return RayCluster(recipe, folder, say=say)
    if section.learners > 1 or section.engines:
        asked = f"{section.learners} learners and {section.engines} engines"
        raise ValueError(
            f'cluster: {asked} need other processes; set cluster.address ("local" starts a Ray '
            f"cluster for the run), or start the run by torchrun --nproc-per-node "
            f"{section.learners} for learners alone"
        )
    return None
