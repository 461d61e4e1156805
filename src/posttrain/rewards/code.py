"""Does the Python that a model wrote pass its unit tests? It runs in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import answered
from posttrain.sandbox import START_SECONDS, Limits, SandboxError, choose, examine
from posttrain.sandbox.blocks import extract_code
from posttrain.sandbox.choice import Choice
from posttrain.sandbox.formats import read_tests
from posttrain.sandbox.programs import IN_ALL, run_cases
from posttrain.types import Score

Tests = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[str]


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
        names = read.assertions.names if read.assertions is not None else ()
        source = extract_code(source, names, reads_input=any(c[0].strip() for c in read.cases))
    source = read.framed(source)
    try:
        if read.assertions is None:
            report = run_cases(source, read.cases, limits=limits, sandbox=backend, partial=partial)
        else:
            report = examine(
                source, read.assertions, limits=limits, sandbox=backend, stop_early=not partial
            )
    except SandboxError as error:
        return Score(value=0.0, state="crashed", reason=str(error))
    if report.broken:
        return Score(value=0.0, state="invalid", reason=report.broken)
    share = report.passed / report.cases
    parts = {"timeout": float(report.ending == "timeout")}
    return Score(value=share if partial else float(share == 1.0), parts=parts, reason=report.reason)
