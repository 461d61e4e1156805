"""Runs code in a sandbox: a program on an input, or functions under tests."""

from __future__ import annotations

import json
import math
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

from posttrain.sandbox.examiner import NO_CASE
from posttrain.sandbox.processes import (
    START_SECONDS,
    Crew,
    Limits,
    Sandbox,
    SandboxError,
    crew,
    read_until,
)
from posttrain.sandbox.unit_tests import Questions
from posttrain.sandbox.worker import READY

Ending = Literal["finished", "timeout", "too much output"]

MAX_REPORT_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended, with which exit status, what it printed, and how long it ran."""

    ending: Ending
    status: int = 0
    output: bytes = b""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """How many cases passed of how many, and why the first that failed did."""

    passed: int
    cases: int
    ending: Ending = "finished"
    reason: str = ""
    broken: str = ""


def run(
    source: str, stdin: str = "", *, limits: Limits, sandbox: Sandbox, seconds: float = math.inf
) -> Outcome:
    """Run a program on a standard input; a ``SandboxError`` where it could not be started.

    ``seconds`` may be a shorter limit than that of ``limits``.

    >>> run("print(int(input()) + 1)", "41", limits=Limits(), sandbox="none").output
    b'42\\n'
    """
    with crew(sandbox, limits) as team:
        status_read, status_write = team.pipe()
        output_read, output_write = team.pipe()
        text = team.content(source.encode("utf-8", "surrogatepass"))
        entered = team.content(stdin.encode("utf-8", "surrogatepass"))
        process = team.start(
            "worker",
            ["program", text, status_write],
            passed=[text, status_write],
            stdin=entered,
            stdout=output_write,
        )
        team.close(entered, output_write)
        _await_ready(team, status_read)
        began = time.monotonic()
        deadline = began + min(limits.seconds, seconds)
        output = bytearray()
        while chunk := read_until(output_read, deadline):
            output += chunk
            if len(output) > limits.output_kb * 1024:
                return Outcome(ending="too much output")
        try:
            if chunk is None:
                raise subprocess.TimeoutExpired("solution", limits.seconds)
            # A program may close its standard output long before it ends.
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Outcome(ending="timeout", output=bytes(output))
        return Outcome(
            ending="finished",
            status=process.returncode,
            output=bytes(output),
            seconds=time.monotonic() - began,
        )


def _await_ready(team: Crew, descriptor: int) -> None:
    """Wait until the harness reports that it runs: earlier failures are the sandbox's."""
    deadline = time.monotonic() + START_SECONDS
    received = b""
    while len(received) < len(READY):
        chunk = read_until(descriptor, deadline)
        if not chunk:
            raise _not_started(team)
        received += chunk


def _not_started(team: Crew) -> SandboxError:
    complaint = team.end() or f"no sign of life within {START_SECONDS:g} s"
    return SandboxError(f"the sandbox did not start: {complaint}")


def examine(
    solution: str, questions: Questions, *, limits: Limits, sandbox: Sandbox, stop_early: bool
) -> CaseReport:
    """Put the tests to the functions of a solution; each of the two in a sandbox of its own.

    With ``stop_early`` the first case that fails ends it.
    """
    task = {
        "solution": solution,
        "tests": questions.text,
        "names": questions.names,
        "classes": questions.classes,
        "style": questions.style,
        "called": questions.called,
        "num_cases": questions.num_cases,
        "entry_point": questions.entry_point,
        "stop_early": stop_early,
        "max_bytes": limits.output_kb * 1024,
    }
    with crew(sandbox, limits) as team:
        request_read, request_write = team.pipe()
        reply_read, reply_write = team.pipe()
        report_read, report_write = team.pipe()
        # The worker gets one end of two pipes, and no other descriptor of the examiner.
        ends = [request_read, reply_write]
        team.start("worker", ["serve", *ends], passed=ends)
        ends = [team.content(json.dumps(task).encode()), request_write, reply_read, report_write]
        team.start("examiner", ends, passed=ends, collects=questions.style != "script")
        return _listen(team, report_read, num_cases=questions.num_cases)


def _listen(team: Crew, descriptor: int, *, num_cases: int) -> CaseReport:
    """Follow the examiner's report to its end, or to the deadline."""
    deadline = time.monotonic() + START_SECONDS
    ready = False
    passed: dict[int, bool] = {}  # a case may run several times, and must pass every time
    reason, pending, size = "", b"", 0
    while size < MAX_REPORT_BYTES:
        chunk = read_until(descriptor, deadline)
        if not chunk:
            if not ready:
                raise _not_started(team)
            ending: Ending = "timeout" if chunk is None else "finished"
            late = f"no answer within {team.limits.seconds:g} s"
            reason = reason or (late if chunk is None else "the examination broke off")
            passed[NO_CASE] = False
            return _report(passed, num_cases, ending=ending, reason=reason)
        size += len(chunk)
        *lines, pending = (pending + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if "ready" in message:
                ready, deadline = True, time.monotonic() + team.limits.seconds
            elif "broken" in message:
                return CaseReport(passed=0, cases=1, broken=_printable(message["broken"]))
            elif "done" in message:
                unfinished = num_cases if NO_CASE in passed else 0
                return _report(passed if message["asked"] else {}, unfinished, reason=reason)
            elif "cases" in message:
                num_cases = message["cases"]
            else:
                number = message["case"]
                passed[number] = passed.get(number, True) and message["passed"]
                reason = reason or _printable(message["why"])
    return CaseReport(passed=0, cases=1, reason="the tests report too much")


def _report(
    passed: dict[int, bool], num_cases: int, *, reason: str, ending: Ending = "finished"
) -> CaseReport:
    """How many cases passed of those that ran, or of ``num_cases`` where that is more."""
    cases = max(len(passed), num_cases, 1)
    return CaseReport(passed=sum(passed.values()), cases=cases, ending=ending, reason=reason)


def _printable(text: str) -> str:
    """A text without control characters: it comes from the model, and may reach a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
