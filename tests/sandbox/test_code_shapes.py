"""Tests of code in every shape they come in: right programs score 1, wrong ones 0."""

from textwrap import dedent
from typing import Any

import pytest
from sandbox.code_shapes import ADD, SHAPES

from posttrain.rewards import code_tests
from posttrain.sandbox import available

SANDBOX: Any = "none" if available()[0].why_not else "bubblewrap"


def grade(code: str, tests: Any, **options: Any) -> Any:
    options = {"sandbox": SANDBOX, "seconds": 20, "extract": "whole", **options}
    return code_tests(code, tests, **options)


@pytest.mark.parametrize("verdict", ["right", "wrong"])
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, verdict: str) -> None:
    tests, (right, wrong) = SHAPES[name]
    score = grade(right if verdict == "right" else wrong, dedent(tests))
    assert (score.value, score.state) == (float(verdict == "right"), "ok"), score
    assert bool(score.reason) == (verdict == "wrong")


# id: (tests, what is said of them): they test nothing, or want what there is not
NOTHING_TESTED: dict[str, tuple[str, str]] = {
    "a helper that is never called": ("def go():\n    assert add(1, 2) == 3", "never call"),
    "other functions": ("def f(): return 1\nassert f() == 1", "never call the solution"),
    "constants": ("assert 1 + 1 == 2", "never call the solution"),
    "no assertion": ("import pytest\ndef test():\n    add(1, 2)", "execute no assertion"),
    "an empty loop": ("for x in []:\n    assert add(x, x)", "never call the solution"),
    "a return before": (
        "def check(f):\n    f(1, 2)\n    return\n    assert f(1, 2) == 3\ncheck(add)",
        "execute no assertion"),
    "all skipped": (
        "import pytest\n@pytest.mark.skip\ndef test():\n    assert add(1, 2) == 3", "never call"),
    "a class with __init__": (
        "class TestAdd:\n    def __init__(self): pass\n    def test(self):\n"
        "        assert add(1, 2)",
        "never call the solution"),
    "a fixture of pytest's own": ("def test(tmp_path):\n    assert add(1, 2) == 3", "'tmp_path'"),
    "standard error": (
        "def test(capsys):\n    assert add(1, 2) == 3\n    assert capsys.readouterr().err == ''",
        "standard error"),
    "xfail": (
        "import pytest\n@pytest.mark.xfail\ndef test():\n    assert add(1, 2)",
        "pytest.mark.xfail"),
    "warns": (
        "import pytest\ndef test():\n    with pytest.warns(UserWarning):\n        assert add(1, 2)",
        "pytest.warns"),
    "params of a fixture": (
        "import pytest\n@pytest.fixture(params=[1])\ndef one(request): return 1\n"
        "def test(one):\n    assert add(one, 2)", "params"),
    "mock": ("from unittest.mock import patch\ndef test():\n    assert add(1, 2)", "unittest.mock"),
    "sys.exit": ("import sys\nassert add(1, 2) == 3\nsys.exit(0)", "end their own process"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_TESTED)
def test_tests_that_test_nothing_are_invalid(name: str) -> None:
    tests, reason = NOTHING_TESTED[name]
    score = grade(ADD[0], tests)
    assert (score.value, score.state) == (0.0, "invalid"), score
    assert reason in score.reason


def test_partial_credit_counts_the_tests_that_ran() -> None:
    table = (
        "import pytest\n@pytest.mark.parametrize('a', [0, 1, 2])\ndef test(a):\n"
        "    assert add(a, a) == 2 * a\nclass TestNothing:\n    def test_nothing(self): add(1, 2)\n"
        "def test_zero():\n    assert add(0, 0) == 0"
    )
    assert grade(ADD[1], table, partial=True).value == 0.5
    assert grade(ADD[0], table, partial=True).value == 1.0
    assert grade("def plus(a, b): return 0", table + "\nassert 1", partial=True).value == 0.0


def test_partial_credit_beside_a_function_that_is_not_there() -> None:
    table = "assert absent(1) == 1\nassert add(1, 2) == 3\nassert add(0, 0) == 0"
    assert grade(ADD[0], table, partial=True).value == 2 / 3


def test_check_that_is_called_twice_counts_once() -> None:
    twice = (
        "def check(f):\n    assert f(1, 2) == 3\n    assert f(0, 0) == 0\ncheck(add)\ncheck(add)"
    )
    assert grade(ADD[0], twice, partial=True).value == 1.0
    assert grade(ADD[0], twice, entry_point="add", partial=True).value == 1.0
    flaky = "calls = []\ndef add(a, b):\n    calls.append(a)\n    return a + b + (len(calls) > 2)"
    assert grade(flaky, twice, partial=True).value == 0.0
