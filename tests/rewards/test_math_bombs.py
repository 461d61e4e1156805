"""Answers that would take for ever, or all memory, end at once as wrong ones."""

import json
import subprocess
import sys

import pytest
from rewards.math_corpus_rows import rows
from sandbox.security_page import PAGE, bomb_table

from posttrain.rewards.math.answer import math_answer
from posttrain.rewards.math.evaluator import MAX_OPERATIONS, Evaluator

BOMBS = {
    "tower of stars": "9**9**9**9",
    "tower": "9^{9^{9^{9}}}",
    "tower, chained": "9^9^9^9",
    "tower in an interval": "(1, 9^{9^{9^9}})",
    "tower in brackets": "((((9^{999})^{999})^{999})^{999})^{999}",
    "tower in a fraction": r"\frac{1}{9^{9^{9}}}",
    "tower in an exponent's sum": "2^{1+9^{9^9}}",
    "tower of e": r"e^{e^{e^{e^{9}}}}",
    "tower by exp": r"\exp(\exp(\exp(\exp(9))))",
    "root of a tower": r"\sqrt[9^{9^9}]{2}",
    "large power": "2^{999999999}",
    "large power of ten": r"10^{10000000000}",
    "e-notation": "1e999999999",
    "negative power": "2^{-999999999}",
    "symbolic power": "(x+y+z+1)^{9999}",
    "nested symbolic powers": "((x+1)^{50}+1)^{50}",
    "factorial": "99999999!",
    "factorial tower": "((9!)!)!",
    "factorials": "9!!!!!",
    "factorial of a power": r"\left(9^9\right)!",
    "binomial": r"\binom{1000000000}{500000000}",
    "sum": r"\sum_{k=1}^{1000000000} \frac{1}{k^2}",
    "product": r"\prod_{k=1}^{1000000000} k",
    "integral": r"\int_0^1 e^{e^{x^x}} \sin(x^x) dx",
    "limit": r"\lim_{x \to 0} \frac{\sin(\sin(\sin x))}{x^x}",
    "identity matrix": r"\operatorname{eye}(1000000000)",
    "zeros": r"\operatorname{zeros}(100000,100000)",
    "determinant": r"\begin{vmatrix}9^{99}&x\\y&9^{99}\end{vmatrix}",
    "gamma": r"\Gamma(999999999)",
    "gcd": r"\gcd(9^{9^9}, 3)",
    "products of sums": r"\boxed{(a+b+c+d+f+g+h)^20}",
    "deep parentheses": "(" * 200 + "1" + ")" * 200,
    "deep braces": "{" * 30 + "1" + "}" * 30,
    "braces as deep as may be": "{" * 3 + "1" + "}" * 3,
    "brackets as deep as may be": "([(1)]+[(2)])",
    "deep fractions": r"\frac{1}{" * 100 + "2" + "}" * 100,
    "deep roots": r"\sqrt{" * 100 + "2" + "}" * 100,
    "bars": "|" * 100 + "2" + "|" * 100,
    "unclosed": "(" * 400,
    "minus signs": "-" * 499 + "1",
    "signs": "-+" * 249 + "1",
    "many digits": "9" * 499,
    "a megabyte of digits": "9" * 1_000_000,
    "a megabyte of brackets": "(" * 1_000_000,
    "a megabyte of terms": "x+" * 500_000 + "x",
    "a long sum": "+".join("x" for _ in range(240)),
    "a long product": "x" * 3 + "(x+1)" * 80,
    "a long list": ",".join(str(number) for number in range(60)),
    "carets": "^" * 499,
    "backslashes": "\\" * 499,
    "frac alone": r"\frac" * 99,
    "sqrt alone": r"\sqrt" * 99,
    "text alone": r"\text{" * 80,
    "dollars": "$" * 499,
    "spaces": "1 " * 249,
    "commas": "1," * 249,
    "equations": "x=" * 200 + "1",
    "modulo": r"9^{999} \bmod 7",
    "trigonometry": r"\sin(\cos(\sin(\cos(x^{99}))))",
    "python": "__import__('os').system('true')",
    "not numbers": "\u0663" * 499,
}

MAX_CPU_SECONDS = 120  # for all of them together: one that goes off takes for ever

# The limits are set in the process itself: it is started as any other, whatever threads run here.
GRADE_ALL = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MAX_CPU_SECONDS}, {MAX_CPU_SECONDS}))  # not of a clock
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from posttrain.rewards.math.answer import math_answer
for text, answers in json.load(sys.stdin):
    print(json.dumps([text[:40], "starts"]), flush=True)
    print(json.dumps([math_answer(text, answer) for answer in answers]), flush=True)
"""


def test_every_bomb_ends_as_a_wrong_answer():
    """In one process, as with ``grading.workers = 0``: nothing could be killed there."""
    bombs = [(text, ["7", "x+1", "(1,2)"], [0.0] * 3) for text in BOMBS.values()]
    bombs += [(t, [row.gold], [float(row.equal)]) for row in rows("bombs") for t in row.completions]
    result = subprocess.run(
        [sys.executable, "-c", GRADE_ALL],
        input=json.dumps([bomb[:2] for bomb in bombs]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"went off: {result.stdout[-200:]}{result.stderr[-2000:]}"
    graded = [json.loads(line) for line in result.stdout.splitlines()[1::2]]
    assert graded == [verdicts for *_, verdicts in bombs]


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_the_work_of_a_bomb_is_counted(text, monkeypatch):
    """However slow the machine: no more operations than any answer may take, of bounded numbers."""
    counted: list[int] = []
    count = Evaluator.count

    def counting(evaluator: Evaluator, operations: int) -> None:
        counted.append(operations)
        count(evaluator, operations)

    monkeypatch.setattr(Evaluator, "count", counting)
    for answer in ("7", "x+1", "(1,2)"):
        counted.clear()
        assert math_answer(text, answer, extract="whole") == 0
        assert sum(counted[:-1]) <= MAX_OPERATIONS


def test_the_page_lists_every_bomb():
    """Where this fails: python tests/sandbox/security_page.py."""
    assert bomb_table(BOMBS) in PAGE.read_text(encoding="utf-8")
