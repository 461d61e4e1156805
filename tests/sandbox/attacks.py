"""Attacks on the grader of code: each a solution that tries to escape, or to take the machine down.

``ATTACKS`` are all of them, put together in attacks_forgery.py. An attack that gets
through scores 1; the test wants 0 and ``happens`` in the reason. Where ``control`` names a weaker
way of grading, the same code is seen getting through there: a misspelt attack proves nothing.
``@FOLDER@`` is a folder of ours with a file called secret, ``@PORT@`` a port that we listen on.
"""

from dataclasses import dataclass
from typing import Any, Literal

REACHED = "assert attack() == 'reached'"
LIMITS = {"memory_mb": 128, "output_kb": 64}


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack: what it tries, the code, what it is graded with, and what must happen."""

    tries: str
    code: str
    happens: str
    tests: Any = REACHED
    control: Literal["", "none", "naive"] = ""  # none: no sandbox; naive: code and tests in one


def reach(tries: str, happens: str, *lines: str, control: Literal["", "none"] = "none") -> Attack:
    """An attack whose lines raise, unless what they reach for is there."""
    body = "\n".join(f"    {line}" for line in lines)
    return Attack(
        tries=tries,
        happens=happens,
        code=f"import os, socket, sys\ndef attack():\n{body}\n    return 'reached'\n",
        control=control,
    )


def call(name: str, *numbers: str, happens: str = "PermissionError") -> Attack:
    """A system call by its number, past anything that Python would check."""
    line = f"result = libc.syscall({', '.join(numbers)})"
    return Attack(
        tries=f"the system call {name}",
        happens=happens,
        code=(
            "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef attack():\n"
            f"    {line}\n    if result < 0:\n"
            "        raise OSError(ctypes.get_errno(), 'refused')\n    return 'reached'\n"
        ),
    )


FILES = {
    "read /etc/passwd": reach("read it", "FileNotFoundError", "open('/etc/passwd').read()"),
    "read /etc/shadow": reach("read it", "FileNotFoundError", "open('/etc/shadow').read()"),
    "read our files": reach(
        "read a file of the user's", "FileNotFoundError", "open('@FOLDER@/secret').read()"
    ),
    "read home": reach("list /root and /home", "FileNotFoundError", "os.listdir('/root')"),
    "symbolic link": reach(
        "reach a file through a link",
        "FileNotFoundError",
        "os.chdir(__import__('tempfile').mkdtemp())",
        "os.symlink('@FOLDER@/secret', 'link')",
        "open('link').read()",
    ),
    "hard link": reach(
        "keep a file by a second name",
        "OSError: [Errno 18]",
        "os.link('/usr/bin/env', '/tmp/posttrain-attack')",
        control="",
    ),
    "parent folders": reach(
        "climb out of the scratch folder",
        "FileNotFoundError",
        "open('../' * 20 + '@FOLDER@/secret').read()",
    ),
    "write outside": reach(
        "write a file of the user's", "FileNotFoundError", "open('@FOLDER@/new', 'w').write('x')"
    ),
    "write to the root": reach(
        "write into /", "OSError: [Errno 30] Read-only", "open('/new', 'w')", control=""
    ),
    "write to /usr": reach(
        "plant a module for the next run",
        "OSError: [Errno 30] Read-only",
        "open('/usr/lib/python3/sitecustomize.py', 'w')",
        control="",
    ),
    "write to the harness": reach(
        "change the code that grades",
        "OSError: [Errno 30] Read-only",
        "import posttrain.sandbox.wire as wire",
        "open(wire.__file__, 'a').write('#')",
    ),
    "leave a file for the next run": Attack(
        tries="find in /tmp what an earlier run left (every run leaves it)",
        happens="AssertionError",
        code=(
            "import os\ndef attack():\n    found = os.path.exists('/tmp/posttrain-left')\n"
            "    open('/tmp/posttrain-left', 'w')\n    return 'reached' if found else 'not'\n"
        ),
    ),
    "disks": reach("open a disk", "FileNotFoundError", "os.listdir('/dev/disk')", control=""),
    "terminal": reach(
        "type into our terminal", "FileNotFoundError", "open('/dev/tty')", control=""
    ),
}
PROCESSES = {
    "environment": reach(
        "read the variables we were started with",
        "KeyError",
        "os.environ['POSTTRAIN_SECRET']",
        control="",
    ),
    "environment of the parent": reach(
        "read them in /proc",
        "FileNotFoundError",
        "found = b''",
        "for process in filter(str.isdigit, os.listdir('/proc')):",
        "    try: found += open(f'/proc/{process}/environ', 'rb').read()",
        "    except OSError: pass",
        "assert b'POSTTRAIN_SECRET' in found",
    ),
    "processes of the machine": reach(
        "list them", "FileNotFoundError", "assert len(os.listdir('/proc')) > 5"
    ),
    "host name": reach(
        "learn the machine's name",
        "AssertionError",
        "assert socket.gethostname() == '@HOST@'",
    ),
    "kill the parent": Attack(
        tries="kill the process that started it",
        happens="AssertionError",
        code=(
            "import os, signal\ndef attack():\n    os.kill(os.getppid(), signal.SIGKILL)\n"
            "    return 'still here'\n"
        ),
    ),
    "kill everybody": Attack(
        tries="kill every process it may",
        happens="ProcessLookupError",
        code="import os\ndef attack():\n    os.kill(-1, 9)\n",
    ),
    "kill the process group": Attack(
        tries="kill the group it is in",
        happens="the other end is gone",
        code="import os\ndef attack():\n    os.killpg(0, 9)\n",
    ),
    "fork bomb": reach("fork for ever", "PermissionError", "while True: os.fork()", control=""),
    "daemon": reach(
        "outlive the grading: fork, setsid, fork",
        "PermissionError",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    if os.fork() == 0: __import__('time').sleep(60)",
        "    os._exit(0)",
        control="",
    ),
    "subprocess": reach(
        "start a shell", "PermissionError", "import subprocess", "subprocess.run(['/bin/true'])"
    ),
    "multiprocessing": reach(
        "start a process pool",
        "PermissionError",
        "import multiprocessing",
        "multiprocessing.get_context('fork').Process(target=print).start()",
    ),
    "posix_spawn": reach("spawn", "PermissionError", "os.posix_spawn('/bin/true', ['true'], {})"),
    "become another program": Attack(
        tries="replace the process by /bin/true, which ends well",
        happens="the other end is gone",
        code="import os\ndef attack():\n    os.execv('/bin/true', ['true'])\n",
    ),
    "setuid": reach("become root", "OSError", "os.setuid(0)"),
    "setuid program": Attack(
        tries="run su, which is setuid",
        happens="the other end is gone",
        code="import os\ndef attack():\n    os.execv('/bin/su', ['su', '-c', 'true'])\n",
    ),
    "raise the limits": reach(
        "take back the limit on memory",
        "ValueError: not allowed to raise maximum limit",
        "import resource",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        control="",
    ),
}
NETWORK = {
    "localhost": reach(
        "connect to a server of ours",
        "PermissionError",
        "socket.create_connection(('127.0.0.1', @PORT@), timeout=1)",
    ),
    "internet": reach(
        "send a datagram",
        "PermissionError",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        control="",
    ),
    "names": reach(
        "look a name up", "name resolution", "socket.getaddrinfo('example.com', 80)", control=""
    ),
    "unix socket": reach("make a local socket", "PermissionError", "socket.socket(socket.AF_UNIX)"),
    "netlink": reach(
        "talk to the kernel's network", "PermissionError", "socket.socket(socket.AF_NETLINK, 3)"
    ),
}
KERNEL = {
    "ptrace": call("ptrace", "101", "16", "os.getppid()", "0", "0"),
    "read another's memory": call("process_vm_readv", "310", "1", "0", "0", "0", "0", "0"),
    "mount": call("mount", "165", "b'none'", "b'/tmp'", "b'tmpfs'", "0", "0"),
    "chroot": reach("chroot", "PermissionError", "os.chroot('/tmp')"),
    "unshare": call("unshare (a user namespace, to be root in)", "272", "0x10000000"),
    "clone": call("clone (a user namespace)", "56", "0x10000011", "0", "0", "0", "0"),
    "keyring": call("keyctl", "250", "0", "-3", "0"),
    "bpf": call("bpf", "321", "0", "0", "0"),
    "perf": call("perf_event_open", "298", "0", "0", "-1", "-1", "0"),
    "userfaultfd": call("userfaultfd", "323", "1"),
    "io_uring": call("io_uring_setup", "425", "1", "0"),
    "uncounted memory": call("memfd_create", "319", "b'x'", "0"),
    "x32 numbers": call(
        "getpid by its x32 number", "0x40000000 + 39", happens="the other end is gone"
    ),
}
