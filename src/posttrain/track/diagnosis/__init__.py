"""Diagnosis: rules over the metrics of a run that name what is wrong and what to do about it."""

from posttrain.track.diagnosis.findings import (
    FILE_NAME,
    Diagnosing,
    Diagnosis,
    Finding,
    read_findings,
)
from posttrain.track.diagnosis.history import Background
from posttrain.track.diagnosis.rules import RULES

__all__ = [
    "FILE_NAME",
    "Diagnosing",
    "Diagnosis",
    "Finding",
    "RULES",
    "Background",
    "read_findings",
]
