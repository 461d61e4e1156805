"""Which part of a completion is the program, what may stand in it, and the forms of benchmarks."""

import json
from typing import Any

import pytest
from rewards.mishaps import Pooled
from sandbox.test_code_shapes import SANDBOX, grade

from posttrain.rewards import code, code_tests
from posttrain.sandbox import Outcome, programs
from posttrain.sandbox.blocks import extract_code
from posttrain.sandbox.formats import read_tests
from posttrain.types import Prompt, Rollout, Turn

SQUARE = "def square(n):\n    return n * n\n"
SQUARES = "assert square(2) == 4\nassert square(3) == 9\n"
WRONG = SQUARE.replace("*", "+")

# id: a completion that is right, and wrong where SQUARE is replaced by WRONG
WRITTEN = {
    "no label": f"```\n{SQUARE}```",
    "usage after it": f"```python\n{SQUARE}```\nUse it:\n```python\nprint(square(2))\n```",
    "usage with an import": (
        f"```python\n{SQUARE}```\n```python\nfrom solution import square\nprint(square(2))\n```"
    ),
    "output after it": f"```python\n{SQUARE}```\nprints\n```\n4\n9\n```",
    "no label, output after it": f"```\n{SQUARE}```\nprints\n```\n4\n```",
    "a session after it": f"```python\n{SQUARE}```\n```python\n>>> square(2)\n4\n```",
    "tests after it": f"```python\n{SQUARE}```\n```python\nassert square(2) == 5\n```",
    "a draft before it": f"```python\ndef square(n): return 0\n```\nNo:\n```python\n{SQUARE}```",
    "a helper before it": (
        "```python\nimport operator\ndef times(a, b):\n    return operator.mul(a, b)\n```\n"
        f"```python\n{SQUARE.replace('n * n', 'times(n, n) * 1')}```"
    ),
    "a broken draft before it": f"```python\ndef square(n) return\n```\n```python\n{SQUARE}```",
    "in a list": "1. So:\n   ```python\n" + SQUARE.replace("def", "   def").replace(
        "    return", "       return") + "   ```",
    "a fence after text": f"So: ```python\n{SQUARE}```",
    "a fence named in a sentence": f"It goes in ```python\nand ends so.\n```python\n{SQUARE}```",
    "after its reasoning": (
        f"<think>```python\n{SQUARE.replace('n * n', 'n')}```</think>\n```python\n{SQUARE}```"
    ),
    "no fence after its reasoning": f"<think>a draft:\n```\nnone\n```\n</think>\n{SQUARE}",
    "tildes": f"~~~python\n{SQUARE}~~~",
    "a longer fence": f"````python\n'''\n```\nnot the end\n```\n'''\n{SQUARE}````",
    "Python 3 and a title": f"```Python3 title=a.py\n{SQUARE}```",
    "never closed": f"Sure.\n```python\n{SQUARE}",
    "a fence in a docstring": (
        "```python\ndef square(n):\n    \"\"\"The square.\n\n    ```\n    square(2)\n    ```\n"
        "    \"\"\"\n    return n * n * 1\n```"),
    "a last fence as far in as the code": f"```python\n{SQUARE}    ```\nIt squares.",
    "no fence": SQUARE,
    "a byte order mark": f"\ufeff{SQUARE}",
    "a byte order mark in the fence": f"```python\n\ufeff{SQUARE}```",
    "Windows lines": f"```python\n{SQUARE}```".replace("\n", "\r\n"),
    "tabs": f"```python\n{SQUARE}```".replace("    ", "\t"),
    "a main": f"{SQUARE}if __name__ == '__main__':\n    print(square(int(input())))",
    "prints while it loads": f"print('hello')\n{SQUARE}print(square(2))",
    "input while it loads": f"{SQUARE}n = int(input())\nprint(square(n))",
    "a type hint of the future": f"from __future__ import annotations\n{SQUARE}",
}  # fmt: skip
HINTED = "def total(xs: List[int]) -> int:\n    return sum(xs)\n"
QUESTION = "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n"
CHECK = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
METHOD = (
    "class Solution:\n    def total(self, xs: List[int], k: int = 0) -> int:\n        return {}\n"
)
PROGRAM = "n = int(input())\nprint(n * n)\n"


@pytest.mark.parametrize("verdict", ["right", "wrong"])
@pytest.mark.parametrize("name", WRITTEN)
def test_written(name: str, verdict: str) -> None:
    text = WRITTEN[name].replace("* 1", "* 1" if verdict == "right" else "* 2")
    if verdict == "wrong":
        text = text.replace("n * n", "n + n + 1")
    score = grade(text, SQUARES, extract="fence")
    assert (score.value, score.state) == (float(verdict == "right"), "ok"), score


@pytest.mark.parametrize("end", ["</think>\nI give up.", "</think>", ""])
@pytest.mark.parametrize("extract", ["fence", "whole"])
def test_a_draft_in_the_reasoning_is_no_answer(extract: str, end: str) -> None:
    draft = f"```python\n{SQUARE}```" if extract == "fence" else SQUARE
    score = grade(f"<think>\n{draft}\n{end}", SQUARES, extract=extract)
    assert (score.value, score.state) == (0.0, "ok"), score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"```python\n{PROGRAM}```\nFor example\n```\n3\n```\nprints\n```\n9\n```", PROGRAM),
        (f"```\n{PROGRAM}```\nFor example\n```\n3\n```", PROGRAM),
        (f"```python\n{PROGRAM}```\nAs a function:\n```python\nf = lambda n: n * n\n```", PROGRAM),
        (f"```cpp\nint main() {{}}\n```\n```python\n{PROGRAM}```", PROGRAM),
    ],
)
def test_the_program_that_reads_input(text: str, expected: str) -> None:
    assert extract_code(text, reads_input=True) == expected


def test_a_program_that_was_cut_off_is_not_replaced_by_a_draft() -> None:
    text = f"```python\n{SQUARE}```\nBetter:\n```python\ndef square(n):\n    return n * ("
    assert extract_code(text, ["square"]) == "def square(n):\n    return n * ("


# id: (code, tests and their columns, value)
FORMS: dict[str, tuple[str, dict[str, Any], float]] = {
    "MBPP": (SQUARE, {"tests": SQUARES.splitlines()}, 1),
    "MBPP, wrong": (WRONG, {"tests": SQUARES.splitlines()}, 0),
    "HumanEval": (
        "    return sum(xs)", {"tests": CHECK, "entry_point": "total", "preamble": QUESTION}, 1),
    "HumanEval, wrong": (
        "    return 3", {"tests": CHECK, "entry_point": "total", "preamble": QUESTION}, 0),
    "HumanEval, written out": (
        HINTED, {"tests": CHECK, "entry_point": "total", "preamble": QUESTION}, 1),
    "HumanEval, written out, the future first": (
        f"from __future__ import annotations\n{HINTED}",
        {"tests": CHECK, "entry_point": "total", "preamble": QUESTION}, 1),
    "an import that only the question has": (HINTED, {"tests": CHECK, "entry_point": "total"}, 0),
    "HumanEval in one table": (
        HINTED, {"tests": {"test": CHECK, "entry_point": "total", "preamble": QUESTION}}, 1),
    "LiveCodeBench, programs": (
        PROGRAM,
        {"tests": json.dumps([{"input": "3\n", "output": "9\n", "testtype": "stdin"}])}, 1),
    "LiveCodeBench, functions": (
        METHOD.format("sum(xs) + k"),
        {"tests": json.dumps([{"input": "[1, 2]\n4", "output": "7", "testtype": "functional"}]),
         "entry_point": "total"}, 1),
    "LiveCodeBench, functions, wrong": (
        METHOD.format("sum(xs)"),
        {"tests": [{"input": "[1, 2]\n4", "output": "7"}], "entry_point": "total"}, 0),
    "a function and no class": (
        HINTED, {"tests": [{"input": "[1, 2]", "output": "3"}], "entry_point": "total"}, 1),
    "a tuple for JSON's list": (
        "def pair(a): return (a, [a, (a,)])",
        {"tests": [{"input": "1", "output": "[1, [1, [1]]]"}], "entry_point": "pair"}, 1),
    "texts as arguments": (
        "def echo(a, b): return b + a",
        {"tests": [{"input": '"a"\n"b"', "output": '"ba"'}], "entry_point": "echo"}, 1),
    "no such function": (
        "class Solution: pass", {"tests": [{"input": "1", "output": "1"}], "entry_point": "f"}, 0),
    "APPS, programs": (PROGRAM, {"tests": {"inputs": ["2", "3"], "outputs": ["4", "9"]}}, 1),
    "APPS, functions": (
        HINTED, {"tests": {"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [[3]]}}, 1),
    "APPS, functions, wrong": (
        HINTED, {"tests": {"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [[4]]}}, 0),
    "a decimal number": ("print('2.50 a')", {"tests": [{"input": "", "output": "2.5 a"}]}, 1),
    "digits are digits": ("print('101')", {"tests": [{"input": "", "output": "0101"}]}, 0),
    "exit": ("print(9)\nexit()", {"tests": [{"input": "", "output": "9"}]}, 1),
    "quit with a status": ("print(9)\nquit(1)", {"tests": [{"input": "", "output": "9"}]}, 0),
    "one word too many": ("print('2.5 2.5')", {"tests": [{"input": "", "output": "2.5"}]}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_benchmarks(name: str) -> None:
    code, columns, value = FORMS[name]
    score = code_tests(code, **columns, sandbox=SANDBOX, seconds=20)
    assert (score.value, score.state) == (value, "ok"), score


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([{"input": "1", "output": "1", "testtype": "functional"}], "name the function"),
        ([1, 2], "got a list"),
        ({"inputs": ["1"]}, "got a dict of inputs"),
        ("{}", "got a dict"),
    ],
)
def test_other_forms_are_refused(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


# id: (code, tests, what is said): none of them ends
ENDLESS: dict[str, tuple[str, Any, str]] = {
    "a loop": ("def f():\n    while True: pass", "assert f() == 1", "no answer within"),
    "a sleep": (
        "import time\ndef f(): time.sleep(1e6)", "assert f() == 1", "no answer within"),
    "while it loads": ("while True: pass", "assert f() == 1", "no answer within"),
    "output": ("def f():\n    while True: print('x' * 99)", "assert f() == 1", ""),
    "forks": ("import os\ndef f():\n    while True: os.fork()", "assert f() == 1", ""),
    "memory": ("def f():\n    x = [0]\n    while True: x += x", "assert f() == 1", ""),
    "a program": ("while True: pass", [{"input": "", "output": "1"}], "case 1: timeout"),
    "a program that prints": ("while True: print('x' * 99)", [{"input": "", "output": "1"}], ""),
}  # fmt: skip


@pytest.mark.skipif(SANDBOX == "none", reason="forks need a sandbox")
@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_wrong_also_in_the_pool(name: str, pooled: Pooled) -> None:
    """The pool alone would allow a tenth of a second: it goes by what the reward says it needs."""
    code, tests, reason = ENDLESS[name]
    scorer = pooled({"code": {"weight": 1.0, "seconds": 0.5, "memory_mb": 128}}, seconds=0.1)
    prompt = Prompt(id="0", text="", columns={"tests": tests})
    done = Turn(tokens=(), logprobs=(), text=code, stop_reason="stop", version=0)
    (score,) = scorer.score([Rollout(prompt=prompt, turns=(done,), group=0)])
    assert (score.value, score.state) == (0.0, "ok"), score
    assert reason in score.reason


def test_a_list_of_inputs_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the limit of one input, of which each of these takes three quarters."""
    allowed: list[float] = []

    def run(*_: Any, seconds: float, **__: Any) -> Outcome:
        allowed.append(seconds)
        ending: Any = "finished" if seconds >= 3.0 else "timeout"
        return Outcome(ending=ending, output=b"1", seconds=3.0)

    monkeypatch.setattr(programs, "run", run)
    tests = [{"input": "", "output": "1"}] * 20
    score = code_tests("print(1)", tests, sandbox="none", seconds=4.0, partial=True)
    assert allowed == [40.0 - 3.0 * place for place in range(14)]
    assert (score.value, score.state) == (13 / 20, "ok")
    assert score.reason == "case 14: timeout: all inputs together took 40 s"
    assert code.longest_call(seconds=4.0) > 40.0
