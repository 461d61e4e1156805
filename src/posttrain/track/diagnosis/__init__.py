"""Diagnosis: rules over the metrics of a run that name what is wrong and what to do about it."""

from posttrain.track.diagnosis.findings import (
    FILE_NAME,
    Diagnosing,
    Diagnosis,
    Finding,
    read_findings,
)
from posttrain.track.diagnosis.history import Background, Seen
from posttrain.track.diagnosis.rules import RULES, Rule

__all__ = [
    "FILE_NAME",
    "Diagnosing",
    "Diagnosis",
    "Finding",
    "RULES",
    "Rule",
    "Seen",
    "Background",
    "read_findings",
]
