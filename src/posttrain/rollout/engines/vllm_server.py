"""A vLLM server: asked over HTTP with a deadline on every wait, and started where we own it."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORKER = Path(__file__).with_name("vllm_worker.py")
HEALTH_DEADLINE = 10.0  # seconds that a server has to say that it is there
LINES = 10  # of a server's log, in an error

# Runs a server, and ends it with the process that asked for it, however that one ends; where that
# one is gone, so are its weights. SIGTERM is only noted: it may come while the server is begun.
_BESIDE = """
import os, shutil, signal, subprocess, sys, time
parent, folder, told, server = int(sys.argv[1]), sys.argv[2], [], None
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
try:
    server = subprocess.Popen(sys.argv[3:], start_new_session=True)
    while not told and server.poll() is None and os.getppid() == parent:
        time.sleep(0.1)
finally:
    for kind in (signal.SIGTERM, signal.SIGKILL) if server else ():
        try:
            os.killpg(server.pid, kind)
            server.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
    if os.getppid() != parent:  # else a server that is started again needs them
        shutil.rmtree(folder, ignore_errors=True)
"""


class ServerLostError(RuntimeError):
    """A server that does not answer, or that has failed: another one may do better."""


class RefusedError(ValueError):
    """A server that does not take a request: it will not take it again."""


class Server:
    """One that somebody runs at ``host:port``; ``deadline`` is the longest wait for an answer."""

    ours = False

    def __init__(self, address: str, *, deadline: float) -> None:
        parts = urlsplit(address if "//" in address else f"http://{address}")
        self.host, self.port = parts.hostname or "", 0
        with contextlib.suppress(ValueError):  # a port that is none
            self.port = parts.port or 0
        if parts.scheme != "http" or not self.host or not self.port or parts.path.strip("/"):
            raise ValueError(f"vllm: address {address!r}: expected host:port or http://host:port")
        self.deadline = deadline
        self.lost = f"{self} was not asked yet"
        """Why it gets no requests; "" where it does."""
        self.requests, self.dtype, self.longest = 0, "", 0
        self._adapter = ""  # the one that completions are asked of, by its folder
        self._interrupted_by: set[object] = set()
        self._open: set[http.client.HTTPConnection] = set()

    def __str__(self) -> str:
        return f"the vLLM server at {self.host}:{self.port}"

    def start(self, model: Path) -> None:
        """Nothing: it is its owner's to start."""

    def stop(self) -> None:
        """Nothing: it is its owner's to stop."""

    def ended(self) -> bool:
        """Whether it is ours, and its process is over."""
        return False

    def wait(self, patience: float) -> None:
        """Return when it is up; an error after ``patience`` seconds, or as soon as it has ended."""
        until = time.monotonic() + patience
        while True:
            try:
                with self.asked("/health", None, deadline=HEALTH_DEADLINE):
                    return
            except RefusedError as problem:
                raise ValueError(f"{problem}; is it vLLM?") from None
            except ServerLostError as problem:
                if self.ended():
                    raise ServerLostError(f"{self} has ended") from None
                if time.monotonic() >= until:
                    raise ServerLostError(f"{problem}; waited {patience:g} s for it") from None
            time.sleep(0.2)

    def wrote(self) -> str:
        """The end of its log for an error, where there is one."""
        return ""

    def model(self) -> dict[str, Any]:
        """What its worker says of the model it has."""
        return dict(self._call("posttrain_model"))

    def load(self, folder: Path) -> None:
        """Have it take the weights of a model folder once its requests under way have ended.

        An adapter goes beside its base, under a name of its own: one that is not there cannot be
        taken for the one before, nor can anything that was computed with that.
        """
        if (folder / "adapter_config.json").exists():
            self._load_adapter(str(folder))
            return
        try:
            self.ask("/pause?mode=wait", {})
            self._call("posttrain_load", str(folder))
            answer = self.ask("/reset_prefix_cache", {})
            if not answer.get("success", True):
                raise ServerLostError(f"{self} keeps what it computed with the weights before")
        finally:
            self.ask("/resume", {})

    def _load_adapter(self, folder: str) -> None:
        try:
            with self.asked("/v1/load_lora_adapter", {"lora_name": folder, "lora_path": folder}):
                pass
        except RefusedError as problem:
            raise ValueError(
                f"{problem}. It takes no adapters: start it on their base model, with "
                "--enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from None
        self._call("posttrain_load", folder)  # notes down what it has
        before, self._adapter = self._adapter, folder
        if before not in ("", folder):
            unload = self.asked("/v1/unload_lora_adapter", {"lora_name": before})
            with contextlib.suppress(RefusedError), unload:  # one that was started anew has none
                pass

    def complete(
        self, request: dict[str, Any], *, over: Callable[[list[int]], bool] | None = None
    ) -> tuple[list[int], list[float]]:
        """The sampled tokens and their log-probs, to the end or until ``over(tokens)``."""
        tokens: list[int] = []
        logprobs: list[float] = []
        reason = None
        body = {**request, "stream": over is not None}
        body |= {"model": self._adapter} if self._adapter else {}
        with self.asked("/v1/completions", body) as answer:
            for choice in _choices(answer, stream=over is not None):
                tokens += choice["token_ids"]
                known = choice["logprobs"]["token_logprobs"] if choice["token_ids"] else []
                logprobs += [math.nan if each is None else each for each in known]
                reason = choice["finish_reason"] or reason
                if over is not None and over(tokens):
                    return tokens, logprobs
        if reason not in ("stop", "length"):
            raise ServerLostError(f"{self} broke a completion off ({reason})")
        return tokens, logprobs

    def ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """The answer to a question, as JSON."""
        with self.asked(path, body) as answer:
            try:
                return json.loads(answer.read() or b"{}")
            except json.JSONDecodeError:
                raise ValueError(f"{self} answers {path} with no JSON; is it vLLM?") from None

    @contextlib.contextmanager
    def asked(
        self, path: str, body: dict[str, Any] | None, *, deadline: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a question, open; what goes wrong with it names the server."""
        seconds = deadline or self.deadline
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.connect()
            self._open.add(connection)
            self._check_interrupted()  # from here on an interrupt finds the connection
            text = None if body is None else json.dumps(body)
            kind = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, body=text, headers=kind)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                said = answer.read(2000).decode(errors="replace")
                problem = RefusedError if answer.status < 500 else ServerLostError
                raise problem(f"{self} answers {path} with {answer.status}: {said}")
            yield answer
        except TimeoutError:
            raise ServerLostError(f"{self} has not answered {path} within {seconds:g} s") from None
        except (OSError, http.client.HTTPException) as problem:
            self._check_interrupted()
            raise ServerLostError(f"{self} does not answer ({problem or type(problem)})") from None
        finally:
            self._open.discard(connection)
            connection.close()

    def interrupt(self, by: object) -> None:
        """Break off what is being asked, and ask no more until this one resumes."""
        self._interrupted_by.add(by)
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def resume(self, by: object) -> None:
        """Take back one's own interrupt, and nobody else's."""
        self._interrupted_by.discard(by)

    def _check_interrupted(self) -> None:
        if self._interrupted_by:
            raise InterruptedError(f"{self} is asked no more")

    def _call(self, method: str, *arguments: str) -> Any:
        """What the first of its workers answers."""
        body = {"method": method, "args": list(arguments), "timeout": self.deadline}
        try:
            return self.ask("/collective_rpc", body)["results"][0]
        except (RefusedError, ServerLostError) as problem:
            if isinstance(problem, ServerLostError) and f"no attribute '{method}'" not in str(
                problem
            ):
                raise
            raise ValueError(
                f"{problem}. It takes no weights: start it with VLLM_SERVER_DEV_MODE=1, a copy of "
                f"{WORKER} on its PYTHONPATH, and --worker-extension-cls vllm_worker.PolicyWeights"
            ) from None


class OwnServer(Server):
    """One that we start: on this machine alone, in vLLM's own environment, ended with us."""

    ours = True

    def __init__(
        self,
        python: str,
        *,
        arguments: Sequence[str],
        folder: Path,
        log: Path,
        deadline: float,
        base: str = "",
    ) -> None:
        super().__init__("127.0.0.1:1", deadline=deadline)
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._path, self._log, self._base = folder, log, base
        self._began = 0  # where the log of this start begins
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()  # the process
        shutil.copy(WORKER, folder)

    def start(self, model: Path) -> None:
        """Start it on a model folder, or on the base of an adapter's, unless it runs."""
        with self._changing:
            self._check_interrupted()  # who interrupts and then stops it leaves none running
            if self._process is None or self._process.poll() is not None:
                self._process = self._begun(model)

    def _begun(self, model: Path) -> subprocess.Popen[bytes]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*self._command, "--model", self._base or str(model), "--port", str(self.port)]
        usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        own = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self._base else {}
        with self._log.open("ab") as log:
            self._began = log.tell()
            return subprocess.Popen(
                [sys.executable, "-c", _BESIDE, str(os.getpid()), str(self._path), *command],
                env={**usual, **os.environ, **own, "PYTHONPATH": str(self._path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, patience: float) -> None:
        """Return when it is up; to start takes it longer than any patience."""
        super().wait(self.deadline)

    def stop(self) -> None:
        """End it."""
        with self._changing:
            if self._process is not None:
                self._process.terminate()
                self._process.wait()
                self._process = None

    def ended(self) -> bool:
        """Whether its process is over."""
        process = self._process
        return process is not None and process.poll() is not None

    def wrote(self) -> str:
        """The end of its log."""
        with self._log.open("rb") as log:
            log.seek(self._began)
            lines = log.read().decode(errors="replace").splitlines()
        errors = (line for line in lines if " ERROR " in line and "Error: " in line)
        return "\n".join(("; its log:", next(errors, "…"), "…", *lines[-LINES:]))


def _choices(answer: http.client.HTTPResponse, *, stream: bool) -> Iterator[dict[str, Any]]:
    """The one choice of a completion, or its pieces as they come."""
    if not stream:
        yield json.loads(answer.read())["choices"][0]
        return
    for line in answer:
        text = line.decode().removeprefix("data:").strip()
        if text and text != "[DONE]":
            found = json.loads(text)
            if "error" in found:
                raise ServerLostError(f"a completion was broken off: {found['error']}")
            yield from found["choices"][:1]
