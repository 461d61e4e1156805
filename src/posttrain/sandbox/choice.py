"""Which sandboxes this machine offers, and which one to use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from posttrain.sandbox import bubblewrap
from posttrain.sandbox.processes import Sandbox, SandboxError

Choice = Literal["auto", "bubblewrap", "none"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kind of sandbox: what it isolates, and why it cannot be used here, if it cannot."""

    name: Sandbox
    isolates: str
    why_not: str = ""


def available() -> list[Backend]:
    """Every kind of sandbox, the strongest first, each tried on this machine.

    >>> [backend.name for backend in available()]
    ['bubblewrap', 'none']
    """
    return [
        Backend(
            name="bubblewrap",
            isolates="files, network, processes, users, environment, system calls; with limits",
            why_not=bubblewrap.why_not(),
        ),
        Backend(name="none", isolates="nothing; limits on time, memory and file size alone"),
    ]


def choose(sandbox: Choice = "auto") -> Sandbox:
    """The sandbox to use; a ``SandboxError`` where it is unavailable. "none" only by name.

    >>> choose("none")
    'none'
    """
    if sys.platform != "linux":
        raise SandboxError(
            f"code is graded on Linux alone, this is {sys.platform}; use a container"
        )
    if sandbox == "none":
        return "none"
    if sandbox not in ("auto", "bubblewrap"):
        raise SandboxError(f"sandbox: expected auto, bubblewrap or none, got {sandbox!r}")
    reason = bubblewrap.why_not()
    if reason:
        raise SandboxError(
            f"no sandbox for code that a model wrote: {reason}. To run it without one, on a "
            'machine you can spare, set sandbox = "none"'
        )
    return "bubblewrap"
