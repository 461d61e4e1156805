"""A small Ray on this machine for a module's tests, and actors that several tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.distributed.engine_host import EngineHost
from posttrain.distributed.ray_start import DEFAULTS
from posttrain.distributed.replica import RayReplica

ROOT = Path(__file__).parents[2]


def begin_ray(**options: Any) -> None:
    """Begin Ray for this process alone: on this machine's own address, without a dashboard."""
    import ray

    os.environ.update(DEFAULTS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    ray.init(
        **{
            "address": "local",  # and not one that another run has begun on this machine
            "num_cpus": 4,
            "object_store_memory": 150 * 2**20,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "log_to_driver": False,
            "configure_logging": False,
            # A worker imports what a test has pickled.
            "runtime_env": {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
            **options,
        }
    )


class Hosts:
    """Runs in an actor that several pools share: a host for each of them."""

    def __init__(self) -> None:
        self.hosts: dict[int, EngineHost] = {}

    def of(self, key: int, method: str, *given: Any) -> Any:
        return getattr(self.hosts.setdefault(key, EngineHost()), method)(*given)


class Shared(RayReplica):
    """A replica in an actor that others use too, and that outlives it."""

    keys = itertools.count()

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name, deadline=600.0)
        self._shared = actor

    def start(self) -> None:
        self._actor, self._key = self, next(self.keys)

    def stop(self) -> None:
        self._actor = None

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        key, shared = self._key, self._shared
        return SimpleNamespace(remote=lambda *given: shared.of.remote(key, method, *given))


@pytest.fixture(scope="module")
def ray_actors() -> Iterator[list[Any]]:
    """Two actors in a Ray of this module."""
    import ray

    begin_ray()
    yield [ray.remote(Hosts).options(num_cpus=0.1).remote() for _ in range(2)]
    ray.shutdown()


@pytest.fixture
def ray_replicas(ray_actors: list[Any]) -> Callable[[], dict[str, Any]]:
    """Options of a pool over the two actors."""
    import ray

    def options() -> dict[str, Any]:
        found = [Shared(f"engine {number}", actor) for number, actor in enumerate(ray_actors)]
        return {"replicas": found, "share": ray.put, "deadline": 600.0}

    return options
