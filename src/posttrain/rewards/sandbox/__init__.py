"""Sandboxes: run text that a model wrote where it can reach nothing.

``available`` says what this machine offers, ``choose`` takes the strongest, ``run`` runs a program
on a standard input, and ``examine`` puts tests to functions.
"""

from posttrain.rewards.sandbox.choice import Backend, available, choose
from posttrain.rewards.sandbox.grading import Outcome, Report, examine, run
from posttrain.rewards.sandbox.processes import START_SECONDS, Limits, SandboxError
from posttrain.rewards.sandbox.questions import Questions, prepare

__all__ = [
    "START_SECONDS",
    "Backend",
    "Limits",
    "Outcome",
    "Questions",
    "Report",
    "SandboxError",
    "available",
    "choose",
    "examine",
    "prepare",
    "run",
]
