"""Ray itself: is it there, does the address answer, and a cluster of our own on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LOCAL = "local"
THIS_MACHINE = "127.0.0.1"
# Bytes for objects under way in a cluster of our own: all weights at most; more goes to disk.
STORE = min(2 * 2**30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
ANSWERS = 60.0  # seconds that a cluster may take to say that it is one; importing Ray is in them
# Ray turns the loopback address into that of the network, unless it is told not to as on macOS.
ONLY_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
TOKEN = Path("~/.ray/auth_token")
# No reports home; and its processes, which do the work, are not put behind all others of a machine.
DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def load_ray() -> Any:
    """The module ``ray``, or an error that says how to get it."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            'cluster.address: this needs Ray, which is not installed; pip install "posttrain'
            '[cluster]", or drop cluster.address'
        )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def init(address: str) -> Any:
    """Connect this process to the cluster at ``address``, or to a new one on this machine only."""
    host = THIS_MACHINE if address == LOCAL else check_address(address)
    if host in (THIS_MACHINE, "localhost"):
        os.environ.update(ONLY_HERE)
        _reread()
    ray = load_ray()
    if ray.is_initialized():
        raise ValueError(
            "cluster.address: this process is connected to a Ray cluster already; call "
            "ray.shutdown() before the run, or run it in a process of its own"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"address": address}
    if address != LOCAL:
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    else:
        options |= {
            "include_dashboard": False,
            "object_store_memory": STORE,
            "_node_ip_address": THIS_MACHINE,
        }
    with _own_signals():
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise ValueError(f"cluster.address: {explain(address, error)}") from error
    if address == LOCAL:
        try:
            check_only_here(node["NodeManagerAddress"] for node in ray.nodes())
        except ValueError:
            ray.shutdown()
            raise
    # Ray prints of every process that died, past every display; whoever asked it says it better.
    ray._private.worker.print_to_stdstream = lambda *given, **options: None
    return ray


def check_only_here(addresses: Iterable[str]) -> None:
    """Refuse a cluster of our own that others may reach: what keeps it here is private to Ray.

    >>> check_only_here(["127.0.0.1"])
    """
    for address in addresses:
        if address != THIS_MACHINE:
            raise ValueError(
                f"cluster.address: Ray has started a cluster at {address}, where others may reach "
                f"it, though {THIS_MACHINE} was asked for, so it was ended; this version of Ray "
                'is not the one that was tested: pip install "posttrain[cluster]"'
            )


def reach(address: str) -> str:
    """The host of an address where something answers; anything else is an error that says why."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host or not 0 < int(port) < 65536:
        raise ValueError(
            f'cluster.address: {address!r} is not the address of a Ray cluster; give "host:port" '
            'as ray start --head prints it (the port is 6379 unless chosen), or "local"'
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"cluster.address: nothing answers at {address} ({error.strerror or error}); is the "
            "cluster running? ray start --head starts one, posttrain cluster up one for trying; to "
            "go on elsewhere: posttrain resume RUN --cluster.address …"
        ) from None
    return host


def check_address(address: str) -> str:
    """The host of an address where a Ray cluster answers; anything else is an error that says why.

    Ray itself would try for minutes, and then end the process.
    """
    host = reach(address)
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    here = ONLY_HERE if host in (THIS_MACHINE, "localhost") else {}
    known = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    if "RAY_AUTH_MODE" not in os.environ and (known or TOKEN.expanduser().exists()):
        here = {"RAY_AUTH_MODE": "token", **here}  # as ray.init itself does
    load_ray()
    try:
        asked = subprocess.run(
            command,
            env={**os.environ, **here},
            capture_output=True,
            text=True,
            timeout=ANSWERS,
            check=False,
        )
        problem = "" if asked.returncode == 0 else _last_line(asked.stderr or asked.stdout)
        problem = problem or ("" if asked.returncode == 0 else "it is not healthy")
    except subprocess.TimeoutExpired:
        problem = f"no answer for {ANSWERS:g} s"
    if "uthentication" in problem or "AuthToken" in problem:
        raise ValueError(
            f"cluster.address: the cluster at {address} wants a token that is not here; copy "
            f"{TOKEN} from its head, or set RAY_AUTH_TOKEN"
        )
    if problem:
        raise ValueError(
            f"cluster.address: what listens at {address} is not a Ray cluster, or one of another "
            f'version ({problem}); give the port of its head ("ray start --head" prints it, '
            "usually 6379), not that of its dashboard or of ray://"
        )
    return host


def explain(address: str, error: BaseException) -> str:
    """What Ray says, and what to do about it."""
    text = str(error)
    if "ersion mismatch" in text:
        told = " ".join(line.strip() for line in text.splitlines() if line.strip())
        return (
            f"{address} runs another Ray or Python than this process; use the same environment on "
            f"every node and here ({told[:400]})"
        )
    if "this node" in text or "on this host" in text or "node_ip" in text.lower():
        return (
            f"this machine is not a node of the cluster at {address}; join it here with ray start "
            f"--address={address}, or start posttrain on one of its nodes ({_last_line(text)})"
        )
    return f"Ray does not start at {address!r}: {_last_line(text)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _reread() -> None:
    """Where someone has imported Ray before, its constant is set as the environment now says."""
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run has a better use for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
