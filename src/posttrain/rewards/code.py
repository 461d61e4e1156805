"""Does the Python that a model wrote pass its unit tests? It runs in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from posttrain.rewards.declared import declare
from posttrain.rewards.sandbox import (
    Limits,
    Outcome,
    Questions,
    Report,
    SandboxError,
    choose,
    examine,
    prepare,
    run,
)
from posttrain.rewards.sandbox.choice import Choice
from posttrain.rewards.sandbox.processes import Sandbox
from posttrain.types import Score

Tests = str | Mapping[str, str] | Sequence[Mapping[str, str]]

LANGUAGES = ("python", "py", "python3", "")  # what may follow the three backquotes


@declare(checks_answer=True)
def code_tests(
    completion: str,
    tests: Tests,
    entry_point: str = "",
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

    * text: asserts that call the solution's functions, ``"assert double(2) == 4"``;
    * text that defines ``check(candidate)``, with the column ``entry_point``, as in HumanEval; or
      both as ``{"test": text, "entry_point": name}``, where a ``"preamble"`` is put before the
      completion;
    * a list of ``{"input": standard input, "output": expected standard output}`` for programs.

    Code that is wrong, raises, hangs, crashes or misbehaves scores 0, with the reason. Tests that
    cannot be put to any code are ``invalid``, and a sandbox that does not start is ``crashed``.

    >>> answer = "```python\\ndef double(x):\\n    return 2 * x\\n```"
    >>> code_tests(answer, "assert double(2) == 4", sandbox="none").value
    1.0
    """
    limits = Limits(seconds=seconds, memory_mb=memory_mb, output_kb=output_kb)
    backend = choose(sandbox)
    source = completion if extract == "whole" else extract_code(completion)
    try:
        if isinstance(tests, str) and entry_point:
            tests = {"test": tests, "entry_point": entry_point}
        if isinstance(tests, str | Mapping):
            preamble, questions = _read(tests)
            report = examine(
                preamble + source,
                questions,
                limits=limits,
                sandbox=backend,
                stop_early=not partial,
            )
        else:
            report = _run_cases(source, tests, limits=limits, sandbox=backend, partial=partial)
    except SandboxError as error:
        return Score(value=0.0, state="crashed", reason=str(error))
    if report.broken:
        return Score(value=0.0, state="invalid", reason=report.broken)
    share = report.passed / report.cases
    parts = {"timeout": float(report.ending == "timeout")}
    return Score(value=share if partial else float(share == 1.0), parts=parts, reason=report.reason)


def extract_code(text: str) -> str:
    """The last fenced block of Python in a text, or the whole text where there is none.

    A block that is never closed goes on to the end: the model ran out of tokens, or forgot.

    >>> extract_code("Write:\\n```python\\na = 1\\n```\\nThen:\\n```bash\\npython a.py\\n```")
    'a = 1\\n'
    """
    found: list[str] | None = None
    block: list[str] | None = None
    is_open = False
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith("```"):
            if block is not None:
                block.append(line)
        elif is_open:
            is_open, block = False, None
        else:
            is_open = True
            block = [] if line.strip().strip("`").strip().lower() in LANGUAGES else None
            found = found if block is None else block
    return text if found is None else "".join(found)


def _read(tests: str | Mapping[str, str]) -> tuple[str, Questions]:
    """The text to put before the solution, and the tests as the examiner runs them."""
    table = {"test": tests} if isinstance(tests, str) else dict(tests)
    unknown = sorted(table.keys() - {"test", "entry_point", "preamble"})
    if unknown or not isinstance(table.get("test"), str):
        raise ValueError(
            "tests: expected text, a list of inputs and outputs, or a table of 'test', "
            f"'entry_point' and 'preamble', got a table of {', '.join(sorted(table))}"
        )
    entry_point, preamble = table.get("entry_point", ""), table.get("preamble", "")
    return preamble, prepare(table["test"], entry_point=entry_point, preamble=preamble)


def _run_cases(
    source: str,
    cases: Sequence[Mapping[str, str]],
    *,
    limits: Limits,
    sandbox: Sandbox,
    partial: bool,
) -> Report:
    """Run a program on each input. One that runs out of time is not tried again."""
    if not cases:
        raise ValueError("tests: the list of inputs and outputs is empty")
    passed, reason = 0, ""
    outcome = Outcome(ending="finished")
    for place, case in enumerate(cases, start=1):
        if case.keys() != {"input", "output"}:
            raise ValueError(f"tests: expected 'input' and 'output', got {', '.join(case)}")
        outcome = run(source, case["input"], limits=limits, sandbox=sandbox)
        problem = _problem(outcome, case["output"])
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
    printed = outcome.output.decode("utf-8", errors="replace")
    return "" if _lines(printed) == _lines(expected) else "another output than expected"


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and without the empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
