"""Code graded by tests: right, wrong and broken are told apart, in both ways of running it."""

from typing import Any

import pytest

from posttrain.rewards import REWARDS, code_tests
from posttrain.rewards.scorer import RewardScorer
from posttrain.sandbox import SandboxError, available, bubblewrap, choose, prepare
from posttrain.sandbox.blocks import extract_code
from posttrain.types import Prompt

WHY_NOT = available()[0].why_not
SANDBOXES = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")),
    "none",
]
SQUARE = "def square(n):\n    return n * n\n"
SQUARES = "assert square(2) == 4\nassert square(3) == 9\n"
STACK = """
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
"""
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"

# id: (code, tests, value)
GRADED: dict[str, tuple[str, Any, float]] = {
    "right": (SQUARE, SQUARES, 1),
    "wrong": ("def square(n): return 2 * n", SQUARES, 0),
    "raises": ("def square(n): return n / 0", SQUARES, 0),
    "no such function": ("def sqare(n): return n * n", SQUARES, 0),
    "no function but a number": ("square = 4", SQUARES, 0),
    "no Python": ("def square(n) return", SQUARES, 0),
    "nothing": ("", SQUARES, 0),
    "a NUL": (SQUARE + "\0", SQUARES, 0),
    "half a character": (SQUARE + "a = '\ud800'", SQUARES, 0),
    "a raised half character": ("def square(n): raise ValueError('\\ud800')", SQUARES, 0),
    "half a character in a program": ("print(1)  # \ud800", [{"input": "", "output": "1"}], 0),
    "raises while it loads": ("raise ValueError('no')", SQUARES, 0),
    "returns None": ("def square(n): n * n", SQUARES, 0),
    "prints instead": ("def square(n): print(n * n)", SQUARES, 0),
    "check": (SQUARE, {"test": CHECK, "entry_point": "square"}, 1),
    "check fails": ("def square(n): return 4", {"test": CHECK, "entry_point": "square"}, 0),
    "check is called": (SQUARE, {"test": CHECK + "check(square)", "entry_point": "square"}, 1),
    "a function called like a built-in one": (
        "def sum(xs): return xs[0]",
        {"test": "assert sum([5, 6]) == 5", "entry_point": "sum"},
        1,
    ),
    "completes a preamble": (
        "    return n * n",
        {"preamble": "def square(n):\n", "test": SQUARES, "entry_point": "square"},
        1,
    ),
    "a module that the tests forgot": (SQUARE, "assert math.isclose(square(2), 4)", 1),
    "an import in the tests": (SQUARE, "import math\nassert square(2) == math.pow(2, 2)", 1),
    "asserts in a loop": (SQUARE, "for n in range(5):\n    assert square(n) == n ** 2", 1),
    "asserts in a helper": (SQUARE, "def go(n):\n    assert square(n) == n\ngo(1)", 1),
    "the helper fails": (SQUARE, "def go(n):\n    assert square(n) == n\ngo(2)", 0),
    "early return": (
        SQUARE,
        {"test": "def check(f):\n    if f(1) == 1:\n        assert f(2) == 4\n        return\n",
         "entry_point": "square"},
        1,
    ),
    "a setup that fails": (SQUARE, "x = square(1)[0]\nassert x == 1", 0),
    "an exception": (
        "def square(n): raise ValueError(n)",
        "try:\n    square(1)\n    assert False\nexcept ValueError:\n    pass",
        1,
    ),
    "an exception of its own": (
        "class Odd(KeyError): pass\ndef square(n): raise Odd(n)",
        "try:\n    square(1)\n    assert False\nexcept KeyError:\n    pass",
        1,
    ),
    "another exception": (
        "def square(n): raise KeyError(n)",
        "try:\n    square(1)\n    assert False\nexcept ValueError:\n    pass",
        0,
    ),
    "in place": ("def order(xs): xs.sort()", "xs = [2, 1]\norder(xs)\nassert xs == [1, 2]", 1),
    "a generator": ("def up(n): yield from range(n)", "assert list(up(3)) == [0, 1, 2]", 1),
    "named arguments": ("def sub(a, *, b): return a - b", "assert sub(5, b=3) == 2", 1),
    "a class": (STACK, "s = Stack([1])\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2", 1),
    "attributes of a class": (STACK, "s = Stack([1])\nassert s.items == [1]", 1),
    "two objects": (
        STACK + "def join(a, b): return Stack(a.items + b.items)",
        "assert join(Stack([1]), Stack([2])).items == [1, 2]",
        1,
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def square(n): return list(ThreadPoolExecutor(2).map(lambda x: x * x, [n]))[0]",
        SQUARES,
        1,
    ),
    "asyncio": (
        "import asyncio\nasync def later(n): return n * n\n"
        "def square(n): return asyncio.run(later(n))",
        SQUARES,
        1,
    ),
    "a scratch file": (
        "def square(n):\n    import tempfile\n    with tempfile.TemporaryFile() as f:\n"
        "        f.write(b'x' * n)\n        return f.tell() ** 2",
        SQUARES,
        1,
    ),
    "a program": ("print(int(input()) ** 2)", [{"input": "3\n", "output": "9\n"}], 1),
    "a program with a main": (
        "if __name__ == '__main__':\n    print(input())", [{"input": "a", "output": "a"}], 1,
    ),
    "spaces at the ends of lines": ("print('a  \\nb \\n')", [{"input": "", "output": "a\nb"}], 1),
    "a wrong program": ("print(1)", [{"input": "3\n", "output": "9\n"}], 0),
    "one input of two": (
        "print(4)", [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}], 0,
    ),
    "a program that raises": ("print(9)\n1 / 0", [{"input": "", "output": "9"}], 0),
}  # fmt: skip

# id: (tests, what the reason says): broken for every solution, so never a 0
BROKEN: dict[str, tuple[Any, str]] = {
    "passes a function": ("assert square(lambda: 2) == 4", "something other than plain data"),
    "fails by itself": ("assert 1 == 2\nassert square(2) == 4", "fail by themselves"),
    "imports what is not there": ("import numpy\nassert square(2) == 4", "fail by themselves"),
}
REFUSED_TESTS: dict[str, tuple[Any, str]] = {
    "no Python": ("assert square(2) = 4", "they are not Python"),
    "no assert": ("square(2)", "no assert"),
    "empty": ("", "no assert"),
    "check of nothing": (CHECK, "name the function as entry_point"),
    "unknown key": ({"tests": SQUARES}, "a table of 'test', 'entry_point' and 'preamble'"),
    "no cases": ([], "is empty"),
    "a case of other keys": ([{"in": "", "out": ""}], "expected 'input' and 'output'"),
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("name", GRADED)
def test_graded(name: str, sandbox: Any) -> None:
    code, tests, value = GRADED[name]
    score = code_tests(code, tests, extract="whole", sandbox=sandbox, seconds=20)
    assert (score.value, score.state) == (value, "ok"), score
    assert bool(score.reason) == (value == 0)


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_tests_are_not_wrong_answers(name: str, sandbox: Any) -> None:
    tests, reason = BROKEN[name]
    score = code_tests(SQUARE, tests, sandbox=sandbox)
    assert score.state == "invalid"
    assert reason in score.reason


@pytest.mark.parametrize("name", REFUSED_TESTS)
def test_tests_that_cannot_be_read_are_refused(name: str) -> None:
    tests, message = REFUSED_TESTS[name]
    with pytest.raises(ValueError, match=message):
        code_tests(SQUARE, tests, sandbox="none")


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_partial_credit(sandbox: Any) -> None:
    four = "def square(n): return 4"
    tests = SQUARES + "assert square(0) == 0\nassert square(-2) == 4\n"
    check = {"test": CHECK, "entry_point": "square"}
    program = [{"input": n, "output": n} for n in ("1", "2", "4")]
    cases = [(four, tests, 0.5), (four, check, 0.5), ("print(4)", program, 1 / 3)]
    for code, given_tests, share in cases:
        options: dict[str, Any] = {"extract": "whole", "sandbox": sandbox}
        assert code_tests(code, given_tests, partial=True, **options).value == share
        assert code_tests(code, given_tests, **options).value == 0


def test_cases_that_passed_before_a_timeout_count() -> None:
    code = "def square(n):\n    while n == 3: pass\n    return n * n"
    score = code_tests(code, SQUARES, extract="whole", partial=True, sandbox="none", seconds=1)
    assert (score.value, score.parts) == (0.5, {"timeout": 1.0})
    assert score.reason == "no answer within 1 s"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```py\na = 1", "a = 1"),
        ("```python\na = 1\n```\nor\n```Python\na = 2\n```\nbye", "a = 2\n"),
        ("```python\na = 1\n```\n```bash\nls\n```", "a = 1\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("  ```python\n  a = 1\n  ```", "a = 1\n"),
        ("", ""),
    ],
)
def test_extraction(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_names_that_the_solution_gives() -> None:
    tests = "import os\nlimit = 3\nassert abs(f(limit) - math.pi) < helper(os.sep)"
    assert prepare(tests).names == ("f", "helper")
    assert prepare(tests, entry_point="abs").names == ("abs", "f", "helper")
    preamble = "def helper(x):\n    return 1\n\ndef f(x):\n    '''Say.'''\n"
    assert prepare(tests, entry_point="f", preamble=preamble).names == ("f",)
    assert prepare(tests).text.startswith("import math\n")


def test_without_bubblewrap_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "not installed; apt install bubblewrap")
    with pytest.raises(SandboxError, match=r"apt install bubblewrap.*sandbox = \"none\""):
        choose("auto")
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        code_tests(SQUARE, SQUARES)
    assert code_tests(SQUARE, SQUARES, sandbox="none").value == 1
    prompt = Prompt(id="0", text="", columns={"tests": SQUARES})
    assert RewardScorer({"code": 1.0}).score_text(prompt, SQUARE).state != "ok"


def test_it_is_a_reward() -> None:
    assert REWARDS["code"] is code_tests
    scorer = RewardScorer({"code": {"weight": 2.0, "sandbox": "none", "partial": True}})
    prompt = Prompt(id="0", text="Square it.", columns={"tests": SQUARES})
    scorer.check_columns(prompt)
    score = scorer.score_text(prompt, f"Here:\n```python\n{SQUARE}```")
    assert (score.value, score.parts) == (2.0, {"code": 1.0, "code/timeout": 0.0})
