"""The command line that puts a program into a bubblewrap sandbox, and whether that works here."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from posttrain.sandbox.seccomp import MACHINES, filter_program

NOBODY = "65534"  # a user id without rights: RLIMIT_NPROC and file permissions do not bind root
SCRATCH_BYTES = 16 * 2**20
VARIABLES = {"PYTHONHASHSEED": "0"}  # all of the environment: the same code does the same again
DEVICES = ("null", "zero", "random", "urandom")
INSTALL = "install it with `apt install bubblewrap` (or `make setup`, where you may)"
PROBE_SECONDS = 20


def interpreter() -> tuple[str, list[str]]:
    """A Python that an unprivileged user can start, and what must be mounted to find it.

    The system's own is preferred, because the current one may be inside a home folder.
    """
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path, []
    return str(Path(sys.base_prefix, "bin", "python3")), ["--ro-bind", *[sys.base_prefix] * 2]


def command(seccomp: int, files: dict[str, int]) -> list[str]:
    """The command line prefix that runs a program isolated; ``files`` are mounted, read-only.

    ``seccomp`` and the values of ``files`` are descriptors; they must be passed on to the process.
    """
    words = [] if os.geteuid() else _as_nobody()
    words += [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent"]
    words += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
    for name, value in VARIABLES.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr", *_system_folders(), *interpreter()[1]]
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for path, descriptor in files.items():
        words += ["--ro-bind-data", str(descriptor), path]
    words += ["--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/"]
    return [*words, "--chdir", "/tmp", "--seccomp", str(seccomp), "--"]


def _as_nobody() -> list[str]:
    # Not by Popen(user=...), with which Python forks instead of vforking: slow in a process with
    # much memory.
    return ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]


def _system_folders() -> list[str]:
    """/lib and its like: links into /usr on merged systems, folders on others."""
    words = []
    for name in ("bin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    cache = "/etc/ld.so.cache"
    return [*words, "--ro-bind", cache, cache] if os.path.exists(cache) else words


@functools.cache
def why_not() -> str:
    """Why bubblewrap cannot be used on this machine; empty where it can.

    It is tried: a container may have bubblewrap installed and forbid namespaces.
    """
    return _missing() or _trial()


def _missing() -> str:
    """Why bubblewrap cannot be started at all: not installed, or not Linux; else ""."""
    if sys.platform != "linux":
        return f"bubblewrap is for Linux, this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"there is no system-call filter for {platform.machine()} yet"
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed; {INSTALL}"
    if not os.geteuid() and shutil.which("setpriv") is None:
        return "setpriv is not installed, and root must be left; `apt install util-linux`"
    return ""


def _trial() -> str:
    """What went wrong when a Python was started in a sandbox, if anything did."""
    seccomp = descriptor_of(filter_program())
    check = "import sys; sys.exit(0 if sys.version_info >= (3, 10) else 'Python < 3.10')"
    try:
        result = subprocess.run(
            [*command(seccomp, {}), interpreter()[0], "-I", "-S", "-c", check],
            pass_fds=[seccomp],
            env={},
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap did not start: {error}"
    finally:
        os.close(seccomp)
    if not result.returncode:
        return ""
    complaint = result.stderr.decode(errors="replace").strip()
    return f"bubblewrap did not start: {complaint} ('Where it does not start' in docs/security.md)"


def descriptor_of(content: bytes) -> int:
    """A descriptor to read the content from, with no file behind it."""
    descriptor = os.memfd_create("posttrain")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
