"""Attacks on the verdict: wrong solutions that try to be taken for right ones."""

from sandbox.attacks import FILES, KERNEL, NETWORK, PROCESSES, Attack
from sandbox.attacks_objects import OBJECTS, RUNS
from sandbox.attacks_resources import PROGRAMS, RESOURCES

SQUARES = "assert solve(2) == 4\nassert solve(3) == 9"


def forge(tries: str, happens: str, *lines: str) -> Attack:
    """Lines of a wrong solution of SQUARES; a grader that has code and tests in one is fooled."""
    return Attack(
        tries=tries, happens=happens, code="\n".join(lines), tests=SQUARES, control="naive"
    )


def claim(tries: str, happens: str, *lines: str) -> Attack:
    """Like ``forge``, but nothing that a naive grader would fall for."""
    return Attack(tries=tries, happens=happens, code="\n".join(lines), tests=SQUARES)


ANSWERS_TRUE = ("class Yes:", "    def __eq__(self, other): return True")

VERDICTS = {
    "os._exit(0)": forge("end well", "the other end is gone", "import os", "os._exit(0)"),
    "sys.exit(0)": forge("end well", "SystemExit: 0", "import sys", "sys.exit(0)"),
    "exit in a call": forge(
        "end well when called",
        "the other end is gone",
        "import os",
        "def solve(n): os._exit(0)",
    ),
    "atexit": forge(
        "set the exit status at the very end",
        "AssertionError",
        "import atexit, os",
        "atexit.register(os._exit, 0)",
        "def solve(n): return 0",
    ),
    "signal handler": forge(
        "end well on an alarm",
        "the other end is gone",
        "import os, signal, time",
        "signal.signal(signal.SIGALRM, lambda *_: os._exit(0))",
        "signal.setitimer(signal.ITIMER_REAL, 0.05)",
        "def solve(n): time.sleep(9)",
    ),
    "excepthook": forge(
        "end well on an exception",
        "AssertionError",
        "import os, sys",
        "sys.excepthook = lambda *_: os._exit(0)",
        "def solve(n): return 0",
    ),
    "print passed": claim(
        "print what a grader might look for",
        "AssertionError",
        "print('passed', {'passed': True, 'done': True}, flush=True)",
        "def solve(n): return 0",
    ),
    "always equal": forge(
        "return an object equal to everything",
        "AssertionError",
        *ANSWERS_TRUE,
        "def solve(n): return Yes()",
    ),
    "always equal number": forge(
        "the same as a subclass of int",
        "AssertionError",
        "class Yes(int):",
        "    def __eq__(self, other): return True",
        "def solve(n): return Yes(0)",
    ),
    "false class": forge(
        "the same, with a __class__ that says int",
        "Error",
        *ANSWERS_TRUE,
        "    __class__ = int",
        "def solve(n): return Yes()",
    ),
    "reflected comparison": forge(
        "answer from the right of ==, as a subclass may",
        "AssertionError",
        "class Yes(int):",
        "    def __eq__(self, other): return True",
        "    __hash__ = int.__hash__",
        "def solve(n): return Yes(-1)",
    ),
    "always true": Attack(
        tries="return an object that is true and false as needed",
        happens="neither true nor false",
        code="class Yes:\n    def __bool__(self): return True\ndef solve(n): return Yes()",
        tests="assert solve(2)",
        control="naive",
    ),
    "stop the loop": Attack(
        tries="end a test's loop with StopIteration",
        happens="RuntimeError: StopIteration",
        code="def solve(n): raise StopIteration",
        tests="for got, want in zip(map(solve, [2, 3]), [4, 9]):\n    assert got == want",
        control="naive",
    ),
    "empty the argument": Attack(
        tries="change the list that the test compares with",
        happens="AssertionError",
        code="def solve(xs):\n    xs.clear()\n    return []",
        tests="xs = [2, 1]\nassert solve(xs) == sorted(xs)",
        control="naive",
    ),
    "own abs": Attack(
        tries="define the built-in function that the test measures with",
        happens="AssertionError",
        code="def abs(x): return 0\ndef solve(n): return 0.0",
        tests="assert abs(solve(2) - 4.0) < 1e-6",
        control="naive",
    ),
    "own module": Attack(
        tries="define the module that the test measures with",
        happens="AssertionError",
        code="class math:\n    def isclose(*a): return True\ndef solve(n): return 0.0",
        tests="assert math.isclose(solve(2), 4.0)",
        control="naive",
    ),
    "own helper": Attack(
        tries="redefine a helper that the question gives and the test uses",
        happens="AssertionError",
        code="def double(x): return 0\ndef solve(x): return 5",
        tests={
            "preamble": "def double(x):\n    return 2 * x\n\ndef solve(x):\n    '''Half.'''\n",
            "test": "def check(candidate):\n    assert double(candidate(0)) == 0",
            "entry_point": "solve",
        },
    ),
    "patched built-ins": forge(
        "make every AssertionError harmless",
        "AssertionError",
        "import builtins, os, sys",
        "class Quiet(Exception):",
        "    def __init__(self, *a): os._exit(0)",
        "builtins.AssertionError = Quiet",
        "sys.excepthook = lambda *_: os._exit(0)",
        "def solve(n): return 0",
    ),
    "trace": forge(
        "follow the tests with sys.settrace and answer for them",
        "AssertionError",
        "import os, sys",
        "def follow(frame, event, value):",
        "    if frame.f_code.co_name == 'solve': sys.settrace(None)",
        "    return follow",
        "sys.settrace(follow)",
        "sys.excepthook = lambda *_: os._exit(0)",
        "def solve(n): return 0",
    ),
    "frames": forge(
        "find the expected value in the caller's code",
        "Error",
        "import sys",
        "def solve(n):",
        "    code = sys._getframe(1).f_code",
        "    found = [c for c in code.co_consts if isinstance(c, int) and c == n * n]",
        "    return found[0]",
    ),
    "garbage collector": claim(
        "find the tests among all objects",
        "IndexError",
        "import gc, re",
        "def solve(n):",
        "    texts = [str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]",
        "    mark = 'sol' + 've(' + str(n) + ') =='",
        "    return int(re.findall(re.escape(mark) + r' (\\d+)', ' '.join(texts))[0])",
    ),
    "tests in memory": claim(
        "read its own memory, and the examiner's",
        "FileNotFoundError",
        "def solve(n): return open('/proc/self/mem', 'rb').read()",
    ),
    "tests in files": claim(
        "search the disk for the tests",
        "RuntimeError: StopIteration",
        "import os",
        "def solve(n):",
        "    places = [os.path.join(d, f) for top in ('/tmp', '/box')",
        "              for d, _, names in os.walk(top) for f in names]",
        "    mark = 'sol' + 've(3) =='",
        "    return next(p for p in places if mark in open(p, errors='ignore').read())",
    ),
    "descriptors": claim(
        "write verdicts to every descriptor there is",
        "Error",
        "import os",
        "for fd in range(64):",
        '    try: os.write(fd, b\'{"passed": true}\\n{"done": true}\\n\')',
        "    except OSError: pass",
        "def solve(n): return 0",
    ),
    "answers in advance": claim(
        "write replies before they are asked for",
        "Error",
        "import os",
        "for fd in range(3, 64):",
        '    try: os.write(fd, b\'{"value": {"handle": 0}}\\n\' * 9)',
        "    except OSError: pass",
        "def solve(n): return 0",
    ),
    "cut the line": claim(
        "close every descriptor",
        "the other end is gone",
        "import os",
        "os.closerange(0, 4096)",
        "def solve(n): return 0",
    ),
    "patched json": claim(
        "patch the module that carries the answers",
        "Error",
        "import json",
        'json.dumps = lambda *a, **k: \'{"passed": true, "done": true}\'',
        "def solve(n): return 0",
    ),
    "patched harness": claim(
        "patch the harness in its own process",
        "Error",
        "from posttrain.sandbox import examiner, wire, worker",
        "examiner.Examiner.case = lambda *a: None",
        "worker.encode = wire.encode = lambda *a: {'passed': True}",
        "def solve(n): return 0",
    ),
    "import hook": claim(
        "be asked for every import of the tests",
        "AssertionError",
        "import sys",
        "class Hook:",
        "    def find_spec(self, *a): raise SystemExit(0)",
        "sys.meta_path.insert(0, Hook())",
        "def solve(n): return 0",
    ),
    "poisoned modules": Attack(
        tries="put a module of its own where the tests import",
        happens="AssertionError",
        code=(
            "import sys, types\nfake = types.ModuleType('math')\nfake.isclose = lambda *a: True\n"
            "sys.modules['math'] = fake\ndef solve(n): return 0.0\n"
        ),
        tests="import math\nassert math.isclose(solve(2), 4.0)",
        control="naive",
    ),
    "control characters": claim(
        "send control characters to our terminal, in an error's message",
        "ValueError: ?[2J?]0;mine?",
        "def solve(n): raise ValueError('\\x1b[2J\\x1b]0;mine\\x07')",
    ),
    "pickle": claim(
        "return a payload that runs when it is unpickled",
        "AssertionError",
        "import pickle",
        "class Bomb:",
        "    def __reduce__(self): return (print, ('boom',))",
        "def solve(n): return pickle.dumps(Bomb())",
    ),
    "dressed object": claim(
        "return an object whose every method is its own",
        "AssertionError",
        "class Any:",
        "    def __getattr__(self, name): return lambda *a: self",
        "    def __eq__(self, other): return True",
        "    def __iter__(self): return iter([4, 9])",
        "def solve(n): return Any()",
    ),
}
ATTACKS: dict[str, Attack] = {
    **FILES,
    **PROCESSES,
    **NETWORK,
    **KERNEL,
    **RESOURCES,
    **VERDICTS,
    **OBJECTS,
    **RUNS,
    **PROGRAMS,
}
