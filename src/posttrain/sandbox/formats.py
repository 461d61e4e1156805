"""The forms in which tests of code come: HumanEval's, MBPP's, LiveCodeBench's, APPS's."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.sandbox.blocks import UNREADABLE
from posttrain.sandbox.unit_tests import Questions, prepare

FORMS = (
    "tests: expected text, a list of asserts, a list of {'input', 'output'}, a table of 'inputs' "
    "and 'outputs' (with 'fn_name'), or a table of 'test', 'entry_point' and 'preamble'"
)
FUTURE_IMPORT = re.compile(r"^from __future__ import .*$\n?", re.MULTILINE)
# Imports that problems of LeetCode, and so of LiveCodeBench, assume. The built-in pow comes last:
# math.pow, imported above, would shadow it.
FUNCTIONAL_PREAMBLE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import pow
"""
METHOD = """
if {name!r} not in globals() and "Solution" in globals():
    def {name}(*args):
        return Solution().{name}(*args)
"""
# Results are compared in the form of JSON: no tuples, and only strings as keys.
AS_JSON = """\
def as_json(value):
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value
"""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The tests of a solution (unit tests, or inputs and outputs), and the code around it."""

    assertions: Questions | None = None
    cases: tuple[tuple[str, str], ...] = ()
    before: str = ""
    after: str = ""

    def framed(self, source: str) -> str:
        """The solution with the code that goes before and after it."""
        if not self.before and not self.after:
            return source
        future = "".join(FUTURE_IMPORT.findall(source))  # imports from __future__ must come first
        if future:
            source = FUTURE_IMPORT.sub("", source)
        # A preamble may end inside a function, which the solution continues, or repeats as a whole.
        continued = f"{future}{self.before}{source}{self.after}"
        redefined = f"{future}{self.before}    pass\n\n{source}{self.after}"
        return redefined if not _parses(continued) and _parses(redefined) else continued


def read_tests(tests: Any, *, entry_point: str = "", preamble: str = "") -> Examination:
    """Tests in any form that is known; a ``ValueError`` where they are in none.

    >>> read_tests([{"input": "2", "output": "4"}]).cases
    (('2', '4'),)
    >>> read_tests([{"input": "[1, 2]", "output": "3"}], entry_point="total").assertions.names
    ('total',)
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # text that is no JSON may be Python
            tests = json.loads(tests)
    if isinstance(tests, Mapping) and "test" in tests:
        unknown = tests.keys() - {"test", "entry_point", "preamble"}
        if unknown:
            raise ValueError(f"{FORMS}; got a table of {', '.join(sorted(tests))}")
        entry_point = tests.get("entry_point", "") or entry_point
        preamble = tests.get("preamble", "") or preamble
        tests = tests["test"]
    if isinstance(tests, Sequence) and tests and all(isinstance(test, str) for test in tests):
        text = tests if isinstance(tests, str) else "\n".join(tests)
        assertions = prepare(text, entry_point=entry_point, preamble=preamble)
        return Examination(assertions=assertions, before=preamble)
    if isinstance(tests, str):
        raise ValueError("tests: there is no assert in them; write `assert f(1) == 2`")
    pairs, name = _pairs(tests, entry_point)
    if not pairs:
        raise ValueError("tests: the list of inputs and outputs is empty")
    if not name:
        cases = tuple((_text(given), _text(expected)) for given, expected in pairs)
        return Examination(cases=cases, before=preamble)
    assertions = prepare(_functional(pairs, name), entry_point=name)
    before = FUNCTIONAL_PREAMBLE + preamble
    return Examination(assertions=assertions, before=before, after=METHOD.format(name=name))


def _pairs(tests: Any, entry_point: str) -> tuple[list[tuple[Any, Any]], str]:
    """Inputs and outputs, and the function that they are for; no name for a program's."""
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        name = tests.get("fn_name") or entry_point
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in pairs)
        if name and wrapped:  # APPS wraps the return value in a list
            pairs = [(given, expected[0]) for given, expected in pairs]
        return pairs, str(name)
    if not isinstance(tests, Sequence) or not all(isinstance(case, Mapping) for case in tests):
        keys = f" of {', '.join(map(str, sorted(tests)))}" if isinstance(tests, Mapping) else ""
        raise ValueError(f"{FORMS}; got a {type(tests).__name__}{keys}")
    kinds = set()
    for case in tests:
        if not {"input", "output"} <= case.keys() <= {"input", "output", "testtype"}:
            raise ValueError(f"tests: expected 'input' and 'output', got {', '.join(case)}")
        kinds.add(case.get("testtype", "functional" if entry_point else "stdin"))
    if "functional" in kinds and not entry_point:
        raise ValueError("tests: they are functional; name the function as entry_point")
    name = entry_point if "functional" in kinds else ""
    return [(case["input"], case["output"]) for case in tests], name


def _functional(pairs: list[tuple[Any, Any]], name: str) -> str:
    """Calls and their results as asserts."""
    if not name.isidentifier():
        raise ValueError(f"tests: {name!r} is not the name of a function")
    lines = [AS_JSON]
    for given, expected in pairs:
        arguments = given
        if isinstance(given, str):  # one argument a line
            arguments = [_json(line) for line in given.splitlines() if line.strip()]
        wanted = _json(expected) if isinstance(expected, str) else expected
        lines.append(f"assert as_json({name}(*{arguments!r})) == {wanted!r}")
    return "\n".join(lines)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except UNREADABLE:
        return False
    return True
