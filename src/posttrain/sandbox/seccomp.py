"""A system-call filter for the sandbox: classic BPF, written out by hand.

Everything is allowed but a list: new processes (threads may be made), sockets, namespaces and
mounts, debugging other processes, memory that no limit counts, and calls that have been doors into
the kernel. A refused call returns an error, and the program continues.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data, little endian
CLONE_THREAD = 0x00010000
X32_NUMBERS = 0x40000000  # the same calls once more under other numbers, on x86-64

# machine: (its AUDIT_ARCH, clone, clone3)
MACHINES = {"x86_64": (0xC000003E, 56, 435), "aarch64": (0xC00000B7, 220, 435)}

# name: (x86_64, aarch64); None where the machine has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    # Memory that outlives its mapping, and so is not counted by RLIMIT_AS.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, *, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


@functools.cache
def filter_program(machine: str = "") -> bytes:
    """The filter as the kernel reads it: an array of ``struct sock_filter``.

    >>> len(filter_program("x86_64")) % 8
    0
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"no system-call filter for {machine}; known: {', '.join(MACHINES)}")
    audit, clone, clone3 = MACHINES[machine]
    column = list(MACHINES).index(machine)
    refuse = _statement(RETURN, REFUSE | errno.EPERM)
    program = [
        _statement(LOAD, ARCHITECTURE_AT),
        _jump(JUMP_EQUAL, audit, if_true=1, if_false=0),
        _statement(RETURN, KILL_PROCESS),
        _statement(LOAD, NUMBER_AT),
        _jump(JUMP_AT_LEAST, X32_NUMBERS, if_true=0, if_false=1),
        _statement(RETURN, KILL_PROCESS),
        # The C library tries clone3, whose flags a filter cannot read, and falls back to clone.
        _jump(JUMP_EQUAL, clone3, if_true=0, if_false=1),
        _statement(RETURN, REFUSE | errno.ENOSYS),
        _jump(JUMP_EQUAL, clone, if_true=0, if_false=4),
        _statement(LOAD, FIRST_ARGUMENT_AT),
        _jump(JUMP_ANY_BIT, CLONE_THREAD, if_true=1, if_false=0),
        refuse,
        _statement(RETURN, ALLOW),
    ]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [_jump(JUMP_EQUAL, number, if_true=0, if_false=1), refuse]
    return b"".join([*program, _statement(RETURN, ALLOW)])
