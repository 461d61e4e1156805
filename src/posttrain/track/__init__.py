"""Trackers take the numbers of a run: the terminal, a file, TensorBoard, Weights & Biases.

``TRACKERS[name](stage, **options)`` makes one; its keyword-only parameters are its options, so a
recipe may say ``{"name": "wandb", "project": "sums"}``. Anything with ``log`` and ``close`` fits.
"""

from __future__ import annotations

from collections.abc import Callable

from posttrain.protocols import Tracker
from posttrain.track.console import ConsoleTracker
from posttrain.track.jsonl import JsonlTracker
from posttrain.track.printable import printable
from posttrain.track.progress import phase, teller
from posttrain.track.several import Dropped, Several, leave_out
from posttrain.track.stage import Stage, Telling
from posttrain.track.tensorboard import TensorBoardTracker
from posttrain.track.wandb import WandbTracker

TRACKERS: dict[str, Callable[..., Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
ALWAYS = ("jsonl", "console")  # trackers of every run

__all__ = [
    "ALWAYS",
    "ConsoleTracker",
    "Dropped",
    "JsonlTracker",
    "Several",
    "Stage",
    "TRACKERS",
    "Telling",
    "leave_out",
    "phase",
    "printable",
    "teller",
]
