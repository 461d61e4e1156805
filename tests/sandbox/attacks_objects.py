"""Attacks by objects that answer for themselves, and on the ways in which tests are run."""

from sandbox.attacks import Attack

YES = """
class Yes:
    def __init__(self, *given): pass
    def __getattr__(self, name): return lambda *given: True
    def __eq__(self, other): return True
    def __contains__(self, item): return True
    def __len__(self): return 3
    def __getitem__(self, key): return True
    def __hash__(self): return hash(4)
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __float__(self): return 4.0
    def __index__(self): return 4
    def __iter__(self): return iter([4])
"""


def yes(tries: str, happens: str, *, tests: str) -> Attack:
    """A function that returns an object which says yes to everything."""
    code = f"{YES}\ndef solve(n): return Yes()\n"
    return Attack(tries=tries, happens=happens, code=code, tests=tests, control="naive")


def built(tries: str, code: str, *, tests: str) -> Attack:
    """A subclass of a plain type whose methods lie: it arrives as the plain one."""
    return Attack(tries=tries, happens="Error", code=code, tests=tests, control="naive")


TEST = "import pytest\ndef test_solve():\n    assert solve(2) == 4\n"


def collected(tries: str, happens: str, *lines: str, tests: str = TEST) -> Attack:
    """A wrong solution under tests as pytest has them."""
    return Attack(tries=tries, happens=happens, code="\n".join(lines), tests=tests)


OBJECTS = {
    "contains everything": yes(
        "hold whatever the test looks for", "not asked for contains", tests="assert 4 in solve(2)"
    ),
    "any length": yes(
        "have a length of its own", "not asked for len", tests="assert len(solve(2)) == 3"
    ),
    "any attribute": yes(
        "have every attribute", "AttributeError", tests="assert solve(2).is_valid()"
    ),
    "any attribute of a variable": yes(
        "the same, with a name", "AttributeError", tests="x = solve(2)\nassert x.ok\nassert x.done"
    ),
    "any item": yes(
        "have every item", "not asked for getitem", tests="assert solve(2)['ok'] is True"
    ),
    "any place in an order": yes(
        "be below and above everything", "TypeError", tests="assert 3 < solve(2) < 5"
    ),
    "any difference": yes(
        "differ from everything by nothing",
        "not asked for sub",
        tests="assert abs(solve(2) - 4.0) < 1e-6",
    ),
    "any difference, turned": yes(
        "the same from the right", "not asked for sub", tests="assert abs(4.0 - solve(2)) < 1e-6"
    ),
    "any number": yes(
        "become the number on demand",
        "TypeError",
        tests="import math\nassert math.isclose(solve(2), 4.0)",
    ),
    "member of every set": yes(
        "hash and compare like a member", "AssertionError", tests="assert solve(2) in {4, 9}"
    ),
    "equal items": yes(
        "be equal inside a list", "AssertionError", tests="assert [solve(2)] == [4]"
    ),
    "a class for a function": Attack(
        tries="be a class where a function is called",
        happens="AssertionError",
        code=f"{YES}\nclass solve(Yes): pass\n",
        tests="assert solve(2) == 4",
        control="naive",
    ),
    "a class that says yes": Attack(
        tries="say yes as the class that is tested",
        happens="says yes to every contains",
        code=f"{YES}\nclass Bag(Yes): pass\n",
        tests="b = Bag([3])\nassert 3 in b",
        control="naive",
    ),
    "a class with every attribute": Attack(
        tries="have every method that is tested",
        happens="AttributeError",
        code=f"{YES}\nclass Bag(Yes): pass\n",
        tests="b = Bag([3])\nassert b.has(3)",
        control="naive",
    ),
    "a class near everything": Attack(
        tries="differ from any number by nothing, as the class that is tested",
        happens="gave plain data for abs",
        code="class Sum:\n    def __init__(s, *x): pass\n    def __sub__(s, other): return s\n"
        "    __truediv__ = __sub__\n    def __abs__(s): return 0.0",
        tests="assert abs((Sum(1, 2) - 3.0) / 3.0) < 1e-6",
        control="naive",
    ),
    "a class equal to everything": Attack(
        tries="be equal to every object of its class",
        happens="says yes to every eq",
        code=f"{YES}\nclass Bag(Yes): pass\n",
        tests="assert Bag([3]) == Bag([3])",
        control="naive",
    ),
    "a list that lies": built(
        "override a list's operators",
        "class L(list):\n    def __eq__(s, o): return True\n"
        "    def __contains__(s, x): return True\n"
        "def solve(n): return L()",
        tests="assert 4 in solve(2)",
    ),
    "a text that lies": built(
        "override a text's methods",
        "class S(str):\n    def startswith(s, *a): return True\ndef solve(n): return S('')",
        tests="assert solve(2).startswith('four')",
    ),
    "a dict that lies": built(
        "have every key",
        "class D(dict):\n    def __missing__(s, k): return True\ndef solve(n): return D()",
        tests="assert solve(2)['ok'] is True",
    ),
    "a named tuple that lies": built(
        "override a named tuple's operators",
        "from collections import namedtuple\nclass P(namedtuple('P', 'x')):\n"
        "    def __eq__(s, o): return True\ndef solve(n): return P(0)",
        tests="assert solve(2) == (4,)",
    ),
    "a fraction that lies": built(
        "override a fraction's operators, under its name",
        "import fractions\nclass Fraction(fractions.Fraction):\n"
        "    def __eq__(s, o): return True\nFraction.__module__ = 'fractions'\n"
        "def solve(n): return Fraction(0)",
        tests="assert solve(2) == 4",
    ),
    "false list": built(
        "be an instance of list, by its __class__",
        f"{YES}    __class__ = list\ndef solve(n): return Yes()",
        tests="assert isinstance(solve(2), list)",
    ),
}
RUNS = {
    "shadowed test": collected(
        "define the test function itself",
        "AssertionError",
        "def test_solve(): pass",
        "def solve(n): return 0",
    ),
    "shadowed class": collected(
        "define the test class itself",
        "AssertionError",
        "class TestSolve:\n    def test_it(self): pass",
        "def solve(n): return 0",
        tests="class TestSolve:\n    def test_it(self):\n        assert solve(2) == 4",
    ),
    "own pytest": collected(
        "bring a pytest whose approx equals everything",
        "AssertionError",
        "import sys, types",
        "class Any:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True",
        "pytest = types.ModuleType('pytest')",
        "pytest.approx = Any",
        "sys.modules['pytest'] = pytest",
        "def solve(n): return 0.0",
        tests="def test_solve():\n    assert solve(2) == pytest.approx(4.0)",
    ),
    "own unittest": collected(
        "patch unittest in its own process",
        "AssertionError",
        "import unittest",
        "unittest.TestCase.assertEqual = lambda *a: None",
        "def solve(n): return 0",
        tests=(
            "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
            "        self.assertEqual(solve(2), 4)"
        ),
    ),
    "the runner's module": collected(
        "patch what runs the tests",
        "ImportError",
        "from posttrain.sandbox import collected, pytest_module",
        "collected.Runner.run = lambda self: None",
        "def solve(n): return 0",
    ),
    "the tests' module": collected(
        "import the tests, or find them in a frame",
        "ModuleNotFoundError",
        "import sys",
        "def solve(n):",
        "    frame = sys._getframe()",
        "    while frame:",
        "        if 'test_solve' in frame.f_globals: return 4",
        "        frame = frame.f_back",
        "    import tests",
        "    return 4",
    ),
    "no function at all": collected(
        "pass for an error, by defining nothing",
        "'solve' is not defined",
        "other = 1",
        tests=(
            "import pytest\ndef test_solve():\n    with pytest.raises(Exception):\n"
            "        solve(-1)"
        ),
    ),
    "no function, caught": collected(
        "the same where the test has a try",
        "'solve' is not defined",
        "other = 1",
        tests="try:\n    solve(-1)\n    assert False\nexcept Exception:\n    pass",
    ),
    "no function, all caught": collected(
        "the same where the test catches everything",
        "'solve' is not defined",
        "other = 1",
        tests="try:\n    solve(-1)\n    assert False\nexcept:\n    pass",
    ),
    "exit in a test": collected(
        "end the tests by sys.exit",
        "SystemExit: 0",
        "import sys",
        "def solve(n): sys.exit(0)",
    ),
    "false verdicts by exception": collected(
        "raise what the harness raises for broken and for skipped tests",
        "BrokenTestsError",
        "class SkippedError(Exception): pass",
        "class StopExamining(SkippedError): pass",
        "class BrokenTestsError(StopExamining): pass",
        "def solve(n): raise BrokenTestsError('broken')",
    ),
    "an error that is every error": collected(
        "name an exception so that the test catches its own failure",
        "would catch what the tests",
        "TooLow = AssertionError",
        "def solve(n): return n",
        tests="try:\n    solve(-1)\n    assert False\nexcept TooLow:\n    pass",
    ),
    "errors that are every error": collected(
        "the same with several",
        "would catch what the tests",
        "TooLow = (ValueError, Exception)",
        "def solve(n): return n",
        tests="try:\n    solve(-1)\n    assert False\nexcept TooLow:\n    pass",
    ),
    "every error, in a class": collected(
        "the same by an attribute, where the test says so through pytest",
        "would catch what the tests",
        "class Account:\n    TooLow = Exception",
        "def solve(n): return n",
        tests=(
            "import pytest\ndef test_low():\n    try:\n        solve(-1)\n"
            "        pytest.fail('not raised')\n    except Account.TooLow:\n        assert True"
        ),
    ),
    "end as an exception": collected(
        "end where the last test wants an exception",
        "the other end is gone",
        "import os",
        "def solve(n): return 4 if n == 2 else os._exit(0)",
        tests=(
            "import pytest\ndef test_solve():\n    assert solve(2) == 4\n"
            "    with pytest.raises(Exception):\n        solve(-1)"
        ),
    ),
    "end, all caught": collected(
        "the same where the test catches everything",
        "the other end is gone",
        "import os",
        "def solve(n): os._exit(0)",
        tests="try:\n    solve(-1)\n    assert False\nexcept:\n    pass",
    ),
    "close the line as an exception": collected(
        "the same by closing every descriptor",
        "the other end is gone",
        "import os",
        "def solve(n): os.closerange(3, 64)",
        tests="import pytest\ndef test_solve():\n    pytest.raises(Exception, solve, -1)",
    ),
    "nothing to assert": collected(
        "give the test's loop nothing, so that the tests look broken",
        "let no assertion be reached",
        "def solve(n): return []",
        tests="for x in solve(3):\n    assert x > 0",
    ),
    "a value that is none": collected(
        "send a variable that cannot be read, so that the tests look broken",
        "InvalidOperation",
        "import posttrain.sandbox.worker as worker",
        "forged = [['LIMIT', {'decimal.Decimal': 'x'}]]",
        "worker.Worker.do_names = lambda *a: {'names': forged}",
        tests="assert LIMIT == 4",
    ),
    "something to pass on": Attack(
        tries="make the test pass something odd to a function, so that the tests look broken",
        happens="AssertionError",
        code="def solve(n): return ValueError\ndef back(x): return 0",
        tests="assert back(solve(2)) == 2",
    ),
    "a coroutine to pass on": Attack(
        tries="the same with a coroutine",
        happens="AssertionError",
        code="async def solve(n): return 1\ndef back(x): return 0",
        tests="assert back(solve(2)) == 2",
    ),
    "patched built-in functions": Attack(
        tries="patch the built-in functions that the harness uses",
        happens="the other end is gone",
        code=(
            "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 4\n"
            "builtins.all = builtins.any = lambda x: True\ndef solve(n): return 0\n"
        ),
        tests="assert solve(2) == 4",
    ),
    "answers at the end": Attack(
        tries="write replies when the process ends",
        happens="SystemExit",
        code=(
            "import atexit, os\ndef late():\n    for fd in range(3, 64):\n"
            '        try: os.write(fd, b\'{"passed": true}\\n{"done": true}\\n\')\n'
            "        except OSError: pass\natexit.register(late)\ndef solve(n): raise SystemExit\n"
        ),
        tests="assert solve(2) == 4",
    ),
    "answers from a thread": Attack(
        tries="leave a thread that writes replies after the answer",
        happens="Error",
        code=(
            "import os, threading\ndef late():\n    while True:\n        for fd in range(3, 64):\n"
            '            try: os.write(fd, b\'{"value": true, "passed": true, "done": true}\\n\')\n'
            "            except OSError: pass\n"
            "def solve(n):\n    threading.Thread(target=late, daemon=True).start()\n    return 0\n"
        ),
        tests="assert solve(2) == 4\nassert solve(3) == 9",
    ),
    "false handles": Attack(
        tries="send handles and exceptions that are none",
        happens="Error",
        code=(
            "import posttrain.sandbox.worker as worker\n"
            "forged = {'raised': ['ValueError', 'Exception'], 'args': [],\n"
            "          'state': {'args': 3, '__class__': 1, 'with_traceback': 0}}\n"
            "def solve(n):\n    worker.Worker.answer = lambda *a: forged\n    return 0\n"
        ),
        tests="solve(2)\nassert solve(2) == 4",
    ),
}
