"""Forks of this process that can be killed: limits, a pipe, and how each one ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

START = 30.0  # seconds within which a new worker must start: forking a large process takes time
PAUSES = (0.1, 1.0, 5.0)  # seconds to wait before each new attempt to start a process
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG

Worker = TypeVar("Worker")


class Forked:
    """A fork of this process that runs ``work(pipe, *given, other_end=..., **more)``.

    ``line`` is this process's end of the pipe. Linux kills the fork when the thread that made it
    ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, work: Callable[..., None], *given: Any, **more: Any) -> None:
        self.killed = False
        self.parent_thread = threading.current_thread()
        context = multiprocessing.get_context("fork")
        self.line, theirs = _line()
        self._process = context.Process(
            target=work, args=(theirs, *given), kwargs={"other_end": self.line, **more}, daemon=True
        )
        try:
            # Forking with threads is safe here: the worker uses none of theirs.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except OSError:
            self.line.close()
            raise
        finally:
            theirs.close()

    @property
    def ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.exitcode is not None

    def end(self, *, wait: bool) -> str:
        """How the worker died; with ``wait``, it gets a second to do so."""
        if wait:
            self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "no answer"
        try:
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:  # a real-time signal has no name
            return f"signal {-code}"

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        self.killed = True
        if self._process.pid is not None and self._process.is_alive():
            for end in (os.killpg, os.kill):
                try:
                    end(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        self._process.join(5.0)
        self.line.close()


def dies_with_parent(command: Sequence[str]) -> list[str]:
    """The command of a process that Linux kills when the thread that starts it ends.

    For one with a session of its own, which :meth:`Forked.kill` does not reach.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    signalled = f"ctypes.CDLL(None).prctl({_DEATH_OF_PARENT}, {signal.SIGKILL:d})"
    begin = f"import ctypes, os, sys; {signalled}; os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", begin, *command]


def check_forks(option: str, *, what: str) -> None:
    """Raise where this system has no forks; ``option`` counts the workers, 0 does without."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(
            f"{option}: this system cannot copy processes (fork), so {what} cannot run in workers; "
            f"set {option} to 0 to run them inside this process"
        )


def started(make: Callable[[], Worker], *, what: str, option: str) -> Worker:
    """What ``make`` makes; where the system cannot start a process, tried again after a while."""
    for pause in (*PAUSES, 0.0):
        try:
            return make()
        except OSError as error:  # out of memory, processes or files: one may become free soon
            failure = error
            time.sleep(pause)
    raise RuntimeError(
        f"{what}: no worker process can be started ({failure}); free memory, processes or "
        f"open files, or lower {option} (0 does it inside this process)"
    ) from failure


def settle(memory_mb: int) -> None:
    """Give a fork its own session, no input and a memory limit; it dies with its parent.

    Its output goes to stderr, because stdout belongs to the run.
    """
    gc.freeze()  # never free objects from before the fork: that may wait for threads that are gone
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
        # New streams: those of the parent may be a live display, whose lock is never released here.
        errors = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = errors
    with contextlib.suppress(AttributeError):  # a C library that keeps nothing
        ctypes.CDLL(None).malloc_trim(0)  # what the parent keeps for itself is not the fork's
    held = _address_space()
    if held:
        limit = held + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch = sys.modules.get("torch")
    if torch is not None:  # its thread pool does not survive a fork
        torch.set_num_threads(1)


def _address_space() -> int:
    """Bytes of address space in use, most of it shared with the parent; 0 where unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def _line() -> tuple[Connection, Connection]:
    """Two ends of a pipe; sending at the first fails where the other does not read in time."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(None)  # some libraries set a default timeout for every socket
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START), 0))
    return Connection(ends[0].detach()), Connection(ends[1].detach())
