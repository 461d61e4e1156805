"""Programs: run on each input, their output compared with what is expected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from posttrain.sandbox.outcome import CaseReport, Outcome, run
from posttrain.sandbox.processes import START_SECONDS, Limits, Sandbox, SandboxError

IN_ALL = 10  # times ``seconds`` is the limit of all inputs of a program together


def run_cases(
    source: str,
    cases: Sequence[tuple[str, str]],
    *,
    limits: Limits,
    sandbox: Sandbox,
    partial: bool,
) -> CaseReport:
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
    return CaseReport(passed=passed, cases=len(cases), ending=outcome.ending, reason=reason)


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
    # Only decimals may differ in notation: 2.50 is 2.5, but 007 is not 7.
    if word == other or "." not in word + other:
        return word == other
    try:
        return Decimal(word) == Decimal(other)
    except InvalidOperation:
        return False
