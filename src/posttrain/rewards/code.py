"""Does the Python that a model wrote pass its unit tests? It runs in a sandbox."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import answered
from posttrain.sandbox import (
    START_SECONDS,
    Limits,
    Outcome,
    Report,
    SandboxError,
    choose,
    examine,
    run,
)
from posttrain.sandbox.blocks import UNREADABLE, extract_code
from posttrain.sandbox.choice import Choice
from posttrain.sandbox.formats import Examination, read_tests
from posttrain.sandbox.processes import Sandbox
from posttrain.types import Score

Tests = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[str]

IN_ALL = 10  # times ``seconds``: what all inputs of one program may take together
FUTURE_IMPORT = re.compile(r"^from __future__ import .*$\n?", re.MULTILINE)


def longest_call(*, seconds: float = 5.0, **others: Any) -> float:
    """The most seconds that one grading takes by its own limits, with starting the sandboxes."""
    return IN_ALL * seconds + 3 * START_SECONDS


@declare(checks_answer=True, maximum=1.0, longest_call=longest_call)
def code_tests(
    completion: str,
    tests: Tests,
    entry_point: str = "",
    preamble: str = "",
    *,
    extract: Literal["fence", "whole"] = "fence",
    partial: bool = False,
    sandbox: Choice = "auto",
    seconds: float = 5.0,
    memory_mb: int = 512,
    output_kb: int = 256,
) -> Score:
    """1 where the code passes every test, else 0; with ``partial``, the share of cases passed.

    ``tests`` is one of:

    * text: asserts that call the solution's functions, ``"assert double(2) == 4"``, tests as pytest
      and unittest have them, or the examples of a doctest; or a list of asserts, as in MBPP;
    * text that defines ``check(candidate)``, with the column ``entry_point``, as in HumanEval; a
      column ``preamble`` is put before the completion (all as ``{"test": text, "entry_point": name,
      "preamble": text}`` as well);
    * a list of ``{"input": standard input, "output": expected standard output}`` for programs, as
      in LiveCodeBench; with ``entry_point``, inputs and outputs of that function, as JSON.

    Code that is wrong, raises, hangs, crashes or misbehaves scores 0, with the reason. Tests that
    cannot be put to any code, or test nothing, are ``invalid``; a sandbox that does not start is
    ``crashed``. ``seconds`` is the limit of all tests of functions, and of each input of a program;
    all inputs together have ten times that.

    >>> answer = "```python\\ndef double(x):\\n    return 2 * x\\n```"
    >>> code_tests(answer, "assert double(2) == 4", sandbox="none").value
    1.0
    """
    limits = Limits(seconds=seconds, memory_mb=memory_mb, output_kb=output_kb)
    backend = choose(sandbox)
    read = read_tests(tests, entry_point=entry_point, preamble=preamble)
    source = answered(completion).lstrip("\ufeff")
    if extract == "fence":
        names = read.questions.names if read.questions is not None else ()
        source = extract_code(source, names, reads_input=any(c[0].strip() for c in read.cases))
    source = _framed(source, read)
    try:
        if read.questions is None:
            report = _run_cases(source, read.cases, limits=limits, sandbox=backend, partial=partial)
        else:
            report = examine(
                source, read.questions, limits=limits, sandbox=backend, stop_early=not partial
            )
    except SandboxError as error:
        return Score(value=0.0, state="crashed", reason=str(error))
    if report.broken:
        return Score(value=0.0, state="invalid", reason=report.broken)
    share = report.passed / report.cases
    parts = {"timeout": float(report.ending == "timeout")}
    return Score(value=share if partial else float(share == 1.0), parts=parts, reason=report.reason)


def _framed(source: str, read: Examination) -> str:
    """The solution between what is put before and after it."""
    if not read.before and not read.after:
        return source
    future = "".join(FUTURE_IMPORT.findall(source))  # must come first
    if future:
        source = FUTURE_IMPORT.sub("", source)
    # A preamble ends within a function that the solution goes on with, or writes out once more.
    goes_on = f"{future}{read.before}{source}{read.after}"
    anew = f"{future}{read.before}    pass\n\n{source}{read.after}"
    return anew if not _parses(goes_on) and _parses(anew) else goes_on


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except UNREADABLE:
        return False
    return True


def _run_cases(
    source: str,
    cases: Sequence[tuple[str, str]],
    *,
    limits: Limits,
    sandbox: Sandbox,
    partial: bool,
) -> Report:
    """Run a program on each input. One that runs out of time is not tried again."""
    passed, reason, used, began = 0, "", 0.0, time.monotonic()
    outcome = Outcome(ending="finished")
    for place, (given, expected) in enumerate(cases, start=1):
        if time.monotonic() - began - used > 2 * START_SECONDS:
            raise SandboxError("the sandboxes took too long to start")
        left = IN_ALL * limits.seconds - used
        outcome = run(source, given, limits=limits, sandbox=sandbox, seconds=left)
        used += outcome.seconds
        problem = _problem(outcome, expected)
        if problem == "timeout" and left < limits.seconds:
            problem = f"timeout: all inputs together took {IN_ALL * limits.seconds:g} s"
        passed += not problem
        reason = reason or (problem and f"case {place}: {problem}")
        if problem and (not partial or outcome.ending == "timeout"):
            break
    return Report(passed=passed, cases=len(cases), ending=outcome.ending, reason=reason)


def _problem(outcome: Outcome, expected: str) -> str:
    """What is wrong with how a program ended; empty where nothing is."""
    if outcome.ending != "finished":
        return outcome.ending
    if outcome.status:
        return f"exit status {outcome.status}"
    printed, wanted = _lines(outcome.output.decode("utf-8", errors="replace")), _lines(expected)
    same = len(printed) == len(wanted) and all(map(_same_line, printed, wanted))
    return "" if same else "another output than expected"


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and without the empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(printed: str, wanted: str) -> bool:
    """The same text, or the same words, where decimal numbers may be written differently."""
    if printed == wanted:
        return True
    words, others = printed.split(), wanted.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, other: str) -> bool:
    if word == other or "." not in word + other:  # 007 is not 7, but 2.50 is 2.5
        return word == other
    try:
        return Decimal(word) == Decimal(other)
    except InvalidOperation:
        return False
