"""A process that hosts one engine: how it is begun, called and ended, on Ray or elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from posttrain.distributed.engine_host import EngineHost


class DiedError(RuntimeError):
    """A replica is dead, or did not answer in time; the message says which, and how it is known."""


class Replica(Protocol):
    """One process that hosts an :class:`posttrain.distributed.engine_host.EngineHost`."""

    name: str

    def start(self) -> None:
        """Begin a new process, which knows nothing; an older one is ended."""
        ...

    def call(self, method: str, *given: Any) -> Any:
        """What a method of the host returns or raises; ``DiedError`` where no answer comes."""
        ...

    def stop(self) -> None:
        """End the process; a call that waits for it fails."""
        ...


class RayReplica:
    """A replica in a Ray actor; one that is killed, or hangs for ``deadline`` seconds, is dead.

    ``options`` are those of an actor: ``num_cpus``, ``num_gpus``, where it is placed. Ray does not
    restart it: who was begun anew has no weights, and must not serve before it was given some.
    """

    def __init__(self, name: str, *, deadline: float, **options: Any) -> None:
        self.name = name
        self._deadline = deadline
        self._options = options
        self._actor: Any = None

    def start(self) -> None:
        """Begin a new actor; it may wait for resources until it is first called."""
        import ray

        self.stop()
        actor = ray.remote(EngineHost)
        self._actor = actor.options(max_restarts=0, **self._options).remote()

    def call(self, method: str, *given: Any) -> Any:
        """Ask the actor, and wait for its answer for ``deadline`` seconds at most."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        actor = self._actor
        if actor is None:
            raise DiedError(f"{self.name}: it was stopped")
        try:
            return ray.get(getattr(actor, method).remote(*given), timeout=self._deadline)
        except GetTimeoutError:
            waits = f"no answer to {method} within {self._deadline:g} s (cluster.deadline)"
            if method == "build" and self._options:
                asks = ", ".join(f"{key} {value}" for key, value in self._options.items())
                waits += f"; it asks for {asks}: has the cluster that free?"
            raise DiedError(f"{self.name}: {waits}") from None
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # what it was given is lost, not its own mistake
                raise DiedError(f"{self.name}: {_first_line(error.cause)}") from None
            cause: BaseException = error.cause or error
            cause.add_note(f"raised by {self.name} in {method}")
            raise cause from None
        except RayError as error:
            raise DiedError(f"{self.name}: {_first_line(error)}") from None

    def stop(self) -> None:
        """Kill the actor, if there is one."""
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # Ray itself may be gone: so is the actor then
                ray.kill(actor, no_restart=True)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
