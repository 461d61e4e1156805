"""Attacks by exhaustion (time, memory, disk, output), and by whole programs."""

from sandbox.attacks import Attack, reach

PROGRAM = [{"input": "2\n", "output": "4"}]


def program(tries: str, happens: str, *lines: str) -> Attack:
    """A wrong program, graded by what it prints."""
    return Attack(tries=tries, happens=happens, code="\n".join(lines), tests=PROGRAM)


RESOURCES = {
    "infinite loop": Attack(
        tries="never answer", happens="no answer within", code="def attack():\n    while True: pass"
    ),
    "sleep": Attack(
        tries="never answer, using no processor time",
        happens="no answer within",
        code="import time\ndef attack():\n    time.sleep(1e6)",
    ),
    "time bomb": Attack(
        tries="hang while it is loaded", happens="no answer within", code="while True: pass"
    ),
    "ignore signals": Attack(
        tries="ignore every signal, and hang",
        happens="no answer within",
        code=(
            "import signal, time\ndef attack():\n    for number in range(1, 32):\n"
            "        try: signal.signal(number, signal.SIG_IGN)\n        except OSError: pass\n"
            "    time.sleep(1e6)\n"
        ),
    ),
    "thread left running": Attack(
        tries="leave a thread running, then answer wrong",
        happens="AssertionError",
        code=(
            "import threading, time\ndef attack():\n"
            "    threading.Thread(target=time.sleep, args=(1e6,)).start()\n    return 'no'\n"
        ),
    ),
    "thread bomb": reach(
        "start threads without end",
        "RuntimeError: can't start new thread",
        "import threading, time",
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        control="",
    ),
    "huge allocation": Attack(
        tries="take 8 GB", happens="MemoryError", code="def attack():\n    return 'x' * 2**33"
    ),
    "regular expression bomb": Attack(
        tries="backtrack for ever, holding the interpreter",
        happens="no answer within",
        code="import re\ndef attack():\n    return re.match('(a+)+$', 'a' * 64 + 'b')",
    ),
    "huge number": Attack(
        tries="compute for ever in C",
        happens="no answer within",
        code="def attack():\n    return 9 ** 9 ** 9",
    ),
    "huge answer": Attack(
        tries="return more than the examiner can hold",
        happens="too large",
        code="def attack():\n    return ['x' * 1000] * 10_000",
    ),
    "endless iterator": Attack(
        tries="return an iterator without end",
        happens="no answer within",
        code="import itertools\ndef attack():\n    return itertools.repeat('reached')",
        tests="assert list(attack()) == ['reached']",
    ),
    "deep recursion": Attack(
        tries="exhaust the stack",
        happens="RecursionError",
        code="def attack(n=0):\n    return attack(n + 1)",
    ),
    "deeply nested answer": Attack(
        tries="exhaust the examiner's stack",
        happens="RecursionError",
        code="def attack():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    ),
    "deeply nested source": Attack(
        tries="crash the compiler", happens="Error", code="attack = " + "(" * 5000 + ")" * 5000
    ),
    "segmentation fault": Attack(
        tries="crash the interpreter",
        happens="the other end is gone",
        code="import ctypes\ndef attack():\n    ctypes.string_at(0)",
    ),
    "fill the disk": reach(
        "write without end",
        "OSError: [Errno",
        "import signal",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "for n in range(9**9): open(f'/tmp/{n}', 'wb').write(b'x' * 2**20)",
        control="",
    ),
    "endless printing": Attack(
        tries="flood standard output and error",
        happens="no answer within",
        code="import sys\ndef attack():\n    while True: print('x' * 10**6, file=sys.stderr)",
    ),
}
PROGRAMS = {
    "program: exit well": program(
        "end well, printing nothing", "another output", "import os", "os._exit(0)"
    ),
    "program: print passed": program(
        "print a verdict", "another output", "print('{\"passed\": true}')"
    ),
    "program: right, then fail": program(
        "print the answer and end badly", "exit status 3", "print(4)", "raise SystemExit(3)"
    ),
    "program: every answer": program(
        "print all numbers", "another output", "for n in range(100): print(n)"
    ),
    "program: flood": program(
        "print without end", "too much output", "while True: print('x' * 10**5)"
    ),
    "program: NULs and no UTF-8": program(
        "print what is no text",
        "another output",
        "import os",
        "os.write(1, b'4\\x00\\xff\\xfe\\x80')",
    ),
    "program: close and hang": program(
        "close the output and go on",
        "timeout",
        "import os, time",
        "print(4, flush=True)",
        "os.close(1)",
        "time.sleep(1e6)",
    ),
    "program: complain": program(
        "fill the pipe of standard error",
        "another output",
        "import sys",
        "for _ in range(100): sys.stderr.write('x' * 10**5)",
    ),
}
