"""The vLLM servers of an engine: who gets a request, and who has proven to have the weights."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from posttrain.rollout.engines.vllm_server import Server, ServerLostError
from posttrain.rollout.engines.weight_probe import why_unproven
from posttrain.types import Turn

ATTEMPTS = 3  # servers that a request is sent to before the run gives up
# Mean difference between two log-probs of a token that rounding explains (seen: 1e-5, and 0.01).
ROUNDING = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
NOISES = 3  # of what the model's own rounding explains, where that is more: kernels round elsewhere

Result = TypeVar("Result")
Probe = Sequence[Turn]


class Fleet:
    """Servers of one model. A request goes to the one with the fewest.

    A server that is lost (dead, hung, failed) has its requests sent to others, and gets new ones
    once it has the current weights and has proven it. ``config`` is the model's; ``probe(server)``
    samples a few tokens, always the same ones from the same weights.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        config: Any,
        probe: Callable[[Server], Probe],
        deadline: float,
    ) -> None:
        self.servers = servers
        self._config, self._probe, self._deadline = config, probe, deadline
        self._folder = Path()
        self._expected: Probe = []
        self._noise: Callable[[Probe], float] = lambda probe: 0.0
        self._lock = threading.Condition()  # of the four below, and of the servers' requests
        self._sampling, self._updating = 0, False
        self._told: dict[Server, str] = {}
        self._bringing = threading.Lock()  # of the next one
        self._gone: Exception | None = None  # why none came back, until servers are looked after

    def update(
        self,
        folder: Path,
        *,
        score: Callable[[Probe], Probe],
        noise: Callable[[Probe], float],
        patience: float = 0.0,
    ) -> None:
        """Bring the weights of ``folder`` to every server, and have each prove it.

        ``score`` gives the tokens of a probe the log-probs that they must have; ``noise`` says how
        far the model's own rounding moves them, and is asked where they are far apart. A server
        that is not up within ``patience`` seconds is lost; one at least must be there.
        """
        self._folder = folder
        brought = self._each(lambda server: self._bring(server, patience=patience), self.servers)
        probes = self._each(self._probe, brought)
        if not probes:
            raise self._all_lost()
        self._expected, self._noise = score(next(iter(probes.values()))), noise
        for server, probe in probes.items():
            self._judge(server, probe)

    def look_after(self) -> None:
        """See that the servers still have the weights: one that was started anew gets them."""

        def look(server: Server) -> None:
            if server.lost or server.model()["weights"] != str(self._folder):
                self._return(server, patience=0)

        self._gone = None
        with self.sampling():  # an update gives them other weights
            self._each(look, self.servers)

    def check_kept(self) -> None:
        """Raise if somebody else has given a server other weights while we sampled."""

        def check(server: Server) -> None:
            if not server.lost and (found := server.model()["weights"]) != str(self._folder):
                raise ValueError(
                    f"vllm: {server} has weights from {found}, and was given those in "
                    f"{self._folder}: another run uses it at the same time; give each run its own"
                )

        with self.sampling():
            self._each(check, self.servers)

    def complete(
        self, request: dict[str, Any], *, over: Callable[[list[int]], bool] | None = None
    ) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of one completion, from whoever can give it."""
        problems = []
        for _ in range(ATTEMPTS):
            server = self._take()
            try:
                return server.complete(request, over=over)
            except ServerLostError as problem:
                problems.append(str(problem))
                self._lose(server, problem)
            finally:
                with self._lock:
                    server.requests -= 1
        raise ServerLostError(f"vllm: a request failed {ATTEMPTS} times: {'; '.join(problems)}")

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, the weights stay as they are."""
        with self._lock:
            self._await(lambda: not self._updating, "an update of the weights to be over")
            self._sampling += 1
        try:
            yield
        finally:
            with self._lock:
                self._sampling -= 1
                self._lock.notify_all()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, nobody samples: who did has finished its turn, who wants to waits for the end."""
        with self._lock:
            self._updating = True
        try:
            with self._lock:
                self._await(lambda: not self._sampling, "completions that are under way")
            yield
        finally:
            with self._lock:
                self._updating = False
                self._lock.notify_all()

    @contextlib.contextmanager
    def threads(self, number: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that ask the servers; an error in the block breaks off what they ask."""
        pool = ThreadPoolExecutor(max(1, number), thread_name_prefix="vllm")
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for server in self.servers:
                server.interrupt(pool)
            raise
        finally:
            pool.shutdown()
            for server in self.servers:
                server.resume(pool)

    def tell(self) -> None:
        """Warn of the servers that were lost since the last time."""
        with self._lock:
            told, self._told = self._told, {}
        for problem in told.values():
            warnings.warn(f"vllm: {problem}; its requests went elsewhere", stacklevel=3)

    def _each(
        self, work: Callable[[Server], Result], servers: Iterable[Server]
    ) -> dict[Server, Result]:
        """What comes of the same work with every server at once; without those lost by it."""
        with self.threads(len(self.servers)) as pool:
            begun = {server: pool.submit(work, server) for server in servers}
            found = {}
            for server, future in begun.items():
                try:
                    found[server] = future.result()
                except ServerLostError as problem:
                    self._lose(server, problem)
        return found

    def _take(self) -> Server:
        """The server with the fewest requests, one more now; where all are lost, the first back."""
        while True:
            with self._lock:
                up = [server for server in self.servers if not server.lost]
                if up:
                    server = min(up, key=lambda each: each.requests)
                    server.requests += 1
                    return server
            with self._bringing:  # one thread does it, the others find it done, or failed
                if all(server.lost for server in self.servers):
                    if self._gone is not None:
                        raise self._gone
                    try:
                        self._return_any()
                    except (ServerLostError, ValueError) as problem:
                        self._gone = problem
                        raise

    def _return_any(self) -> None:
        """Wait until one of the servers is back, up to the deadline; ours are started once."""
        until = time.monotonic() + self._deadline
        while True:
            for server in self.servers:
                try:
                    return self._return(server, patience=0)
                except ServerLostError as problem:
                    self._lose(server, problem)
            if time.monotonic() >= until or all(server.ours for server in self.servers):
                raise self._all_lost()
            time.sleep(0.5)

    def _return(self, server: Server, *, patience: float) -> None:
        """Have a server back that was lost, with the current weights, once it has proven it."""
        server.stop()
        self._bring(server, patience=patience)
        self._judge(server, self._probe(server))

    def _bring(self, server: Server, *, patience: float) -> None:
        """Have a server up, of the same model, with the current weights."""
        server.start(self._folder)
        server.wait(patience)
        known = server.model()
        for name, size in known["shape"].items():
            own = getattr(self._config, name, None)
            if size != own:
                raise ValueError(
                    f"vllm: {server} has another model: its {name} is {size}, that of the policy "
                    f"{own}; start it on the folder of the policy's model"
                )
        if known["logprobs"] != "processed_logprobs":
            raise ValueError(
                f"vllm: {server} gives {known['logprobs']}, not of the distribution that it "
                "samples from; start it with --logprobs-mode processed_logprobs"
            )
        if known["weights"] != str(self._folder):
            server.load(self._folder)
        server.dtype, server.longest = known["dtype"], known["longest"]

    def _judge(self, server: Server, probe: Probe) -> None:
        """Let a server sample if its probe has the log-probs of the weights it must have."""
        tolerance = ROUNDING[server.dtype]
        found = why_unproven(probe, self._expected, tolerance=tolerance)
        if found and (explained := NOISES * self._noise(probe)) > tolerance:
            found = why_unproven(probe, self._expected, tolerance=explained)
        if found:
            raise ValueError(
                f"vllm: {server} does not sample from the weights it was sent: of the probe, in "
                f"{server.dtype}, {found}. It took them without an error: do not train with it. "
                "Start it with the vllm_worker.py of this version; a model that vLLM cannot "
                'update takes rl.engine = "native"'
            )
        server.lost = ""

    def _lose(self, server: Server, problem: ServerLostError) -> None:
        with self._lock:
            if not server.lost:
                self._told[server] = str(problem)
            server.lost = str(problem)

    def _all_lost(self) -> ServerLostError:
        why = (f"vllm: {server.lost}{server.wrote()}" for server in self.servers)
        return ServerLostError("\n".join(why))

    def _await(self, reached: Callable[[], bool], what: str) -> None:
        """Wait with the lock."""
        if not self._lock.wait_for(reached, timeout=self._deadline):
            raise ServerLostError(f"vllm: waited {self._deadline:g} s for {what}")
