"""Sandboxes: run code that a model wrote, isolated from this machine.

``available`` says what this machine offers, ``choose`` takes the strongest, ``run`` runs a program
on a standard input, and ``examine`` puts tests to functions.
"""

from posttrain.sandbox.choice import Backend, available, choose
from posttrain.sandbox.outcome import CaseReport, Outcome, examine, run
from posttrain.sandbox.processes import START_SECONDS, Limits, SandboxError
from posttrain.sandbox.unit_tests import Questions, prepare

__all__ = [
    "START_SECONDS",
    "Backend",
    "Limits",
    "Outcome",
    "Questions",
    "CaseReport",
    "SandboxError",
    "available",
    "choose",
    "examine",
    "prepare",
    "run",
]
