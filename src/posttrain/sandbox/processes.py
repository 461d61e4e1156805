"""Starts sandboxed processes, listens to one of them until a deadline, and leaves none behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posttrain.sandbox import bubblewrap
from posttrain.sandbox.seccomp import filter_program

Sandbox = Literal["bubblewrap", "none"]

START_SECONDS = 30.0  # seconds to start a sandbox under load; not counted as the solution's time
# The modules of the harness that a program needs: no others are mounted.
HARNESS = {"worker": ("wire", "worker"), "examiner": ("wire", "worker", "remote", "examiner")}
FOR_COLLECTING = ("collected", "pytest_module")
INSIDE = "posttrain/sandbox"  # a namespace package: no __init__.py is mounted
COMPILE = """
import os, py_compile, sys
for source in sys.argv[2:]:
    name = os.path.basename(source)
    target = os.path.join(sys.argv[1], name + "c")
    py_compile.compile(source, cfile=target, dfile=name, doraise=True)
"""
MAX_COMPLAINT = 1000
CHUNK = 65536


class SandboxError(RuntimeError):
    """The sandbox itself failed: the code in it is neither right nor wrong."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one process may use; ``output_kb`` bounds what it prints and each value it returns.

    >>> Limits(seconds=2).resources(sandboxed=True)["CPU"]
    3
    """

    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds: must be above 0 and at most 3600, got {self.seconds}")
        if self.memory_mb < 32:
            raise ValueError(f"memory_mb: Python itself needs 32, got {self.memory_mb}")
        if self.output_kb < 1:
            raise ValueError(f"output_kb: must be at least 1, got {self.output_kb}")

    def resources(self, *, sandboxed: bool) -> dict[str, int]:
        """The limits for ``setrlimit``."""
        found = {
            "CPU": int(self.seconds) + 1,
            "AS": self.memory_mb * 2**20,
            "FSIZE": bubblewrap.SCRATCH_BYTES,
            "NOFILE": 64,
            "CORE": 0,
        }
        # RLIMIT_NPROC counts by user namespace: without a sandbox it would count all processes.
        return found | {"NPROC": 64} if sandboxed else found


@dataclass
class Crew:
    """The processes of one examination, and the descriptors to close after it."""

    sandbox: Sandbox
    limits: Limits
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    descriptors: set[int] = field(default_factory=set)
    folders: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def pipe(self) -> tuple[int, int]:
        """A pipe: the end to read from and the end to write to."""
        ends = os.pipe()
        self.descriptors.update(ends)
        return ends

    def content(self, text: bytes) -> int:
        """A descriptor from which a process reads a text."""
        descriptor = bubblewrap.descriptor_of(text)
        self.descriptors.add(descriptor)
        return descriptor

    def start(
        self,
        module: str,
        words: Sequence[str | int],
        *,
        passed: Sequence[int],
        collects: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start ``main`` of a module of the harness; the descriptors passed are closed here."""
        names = HARNESS[module] + (FOR_COLLECTING if collects else ())
        sandboxed = self.sandbox == "bubblewrap"
        resources = json.dumps(self.limits.resources(sandboxed=sandboxed))
        keep = list(passed)
        if sandboxed:
            filter_fd = self.content(filter_program())
            files = {f"/box/{INSIDE}/{n}.pyc": self.content(_compiled()[n]) for n in names}
            keep += [filter_fd, *files.values()]
            front, folder = bubblewrap.command(filter_fd, files), "/box"
        else:
            front, folder = [], self.unpacked(names)
        boot = (
            f"import sys; sys.path.insert(0, {folder!r}); "
            f"from {INSIDE.replace('/', '.')}.{module} import main; main()"
        )
        # Not -I, which would ignore the variables: they make the order of sets the same.
        python = [bubblewrap.interpreter()[0], "-P", "-s", "-S", "-B", "-X", "utf8", "-c", boot]
        process = subprocess.Popen(
            [*front, *python, resources, *map(str, words)],
            pass_fds=keep,
            env=bubblewrap.VARIABLES,
            start_new_session=True,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        self.processes.append(process)
        self.close(*keep)
        return process

    def unpacked(self, names: Sequence[str]) -> str:
        """A folder with the harness alone, for a process without a sandbox, without torch."""
        made = tempfile.TemporaryDirectory(prefix="posttrain-", ignore_cleanup_errors=True)
        home = Path(self.folders.enter_context(made), INSIDE)
        home.mkdir(parents=True)
        for name in names:
            (home / f"{name}.pyc").write_bytes(_compiled()[name])
        return made.name

    def close(self, *descriptors: int) -> None:
        """Close descriptors of ours, once."""
        for descriptor in self.descriptors.intersection(descriptors):
            os.close(descriptor)
        self.descriptors.difference_update(descriptors)

    def end(self) -> str:
        """Kill all processes, close all descriptors, and return what they wrote to stderr."""
        ended, self.processes = self.processes, []
        for process in ended:
            if process.poll() is not None and self.sandbox != "none":
                continue  # an ended process: its id may belong to another one by now
            # Killing bubblewrap, the only process of the group, ends its whole PID namespace.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        complaints = [_complaint(process) for process in ended]
        self.close(*self.descriptors)
        self.folders.close()
        return " ".join(filter(None, complaints))


@contextlib.contextmanager
def crew(sandbox: Sandbox, limits: Limits) -> Iterator[Crew]:
    """A crew whose processes are killed when the block ends."""
    found = Crew(sandbox=sandbox, limits=limits)
    try:
        yield found
    finally:
        found.end()


def read_until(descriptor: int, deadline: float) -> bytes | None:
    """The next bytes; empty at the end of the stream, None when the time is up."""
    left = deadline - time.monotonic()
    poller = select.poll()  # select.select cannot watch descriptors above 1023
    poller.register(descriptor, select.POLLIN)
    if left <= 0 or not poller.poll(left * 1000):
        return None
    return os.read(descriptor, CHUNK)


def _complaint(process: subprocess.Popen[bytes]) -> str:
    process.wait()
    assert process.stderr is not None
    with process.stderr as stream:
        os.set_blocking(stream.fileno(), False)
        text = stream.read(MAX_COMPLAINT) or b""
    return text.decode(errors="replace").strip()


@functools.cache
def _compiled() -> dict[str, bytes]:
    """The compiled harness: a sandbox keeps no bytecode cache from one start to the next."""
    names = {*itertools.chain(*HARNESS.values()), *FOR_COLLECTING}
    sources = [str(Path(__file__).with_name(f"{name}.py")) for name in sorted(names)]
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        python = [bubblewrap.interpreter()[0], "-I", "-S", "-c", COMPILE, folder, *sources]
        result = subprocess.run(python, env={}, capture_output=True, check=False)
        if result.returncode:
            raise SandboxError(f"the harness was not compiled: {result.stderr.decode()}")
        return {name: Path(folder, f"{name}.pyc").read_bytes() for name in names}
