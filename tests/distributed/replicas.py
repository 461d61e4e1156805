"""Replicas for tests: in this process, with faults on demand; and Ray actors that are kept."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from rollout.cases import ragged

from posttrain.distributed.engine_host import EngineHost
from posttrain.distributed.engine_pool import EnginePool
from posttrain.distributed.pool_member import Probe
from posttrain.distributed.replica import DiedError
from posttrain.models.cache import context_length
from posttrain.protocols import Engine

POOLED = ("probe", "deadline", "say", "share")
PROBE = Probe(prompt=ragged(5)[0], tolerance=1e-3)


class InProcess:
    """Hosts an engine in this process.

    ``fault`` is asked before every call with the method and how many calls of it there were; where
    it returns a text, the replica is dead.
    """

    def __init__(self, name: str, fault: Callable[[str, int], str] = lambda *_: "") -> None:
        self.name = name
        self.fault = fault
        self.calls: dict[str, int] = {}
        self.starts = 0
        self.host: Any = None
        self.lock = threading.Lock()

    def start(self) -> None:
        self.starts += 1
        self.host = EngineHost()

    def call(self, method: str, *given: Any) -> Any:
        number = self.calls.get(method, 0)
        self.calls[method] = number + 1
        reason = self.fault(method, number)
        if reason:
            self.host = None
        host = self.host
        if host is None:
            raise DiedError(f"{self.name}: {reason or 'it was stopped'}")
        return getattr(host, method)(*given)

    def stop(self) -> None:
        self.host = None


def pool_of(
    kind: Callable[..., Engine], model: Any, *, replicas: list[Any] | None = None, **options: Any
) -> EnginePool:
    """A pool of engines, two unless replicas are given; each samples from a copy of the model."""
    folder = copy.deepcopy(model)  # what the engines were made from, whatever is trained since
    pooled = {name: options.pop(name) for name in POOLED if name in options}
    return EnginePool(
        replicas or [InProcess("engine 0"), InProcess("engine 1")],
        lambda: kind(copy.deepcopy(folder), **options),
        longest=context_length(model),
        **{"probe": PROBE, "deadline": 20.0, "say": print, **pooled},
    )
