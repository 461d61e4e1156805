"""A run is a folder: what it was given, what it logged, what it wrote, what came out of it."""

from posttrain.runs.checkpoints import clear as clear_checkpoints
from posttrain.runs.drift import config_digest, differences
from posttrain.runs.files import (
    new_folder,
    read_json,
    replacing,
    write_json,
    write_sealed,
    write_text,
)
from posttrain.runs.folder import RunFolder, StageFolder
from posttrain.runs.ledger import Ledger
from posttrain.runs.metrics_file import frame, merge_steps, read_metrics
from posttrain.runs.rollouts import (
    SCHEMA,
    TOKENS,
    RolloutWriter,
    read_rollouts,
    rollout_file,
    rollout_steps,
    rollout_table,
    rollout_writer,
    sequence_advantages,
    token_ages,
    write_rollouts,
)
from posttrain.runs.store import Filter, Rollouts

__all__ = [
    "RunFolder",
    "StageFolder",
    "clear_checkpoints",
    "config_digest",
    "differences",
    "new_folder",
    "read_json",
    "replacing",
    "write_json",
    "write_sealed",
    "write_text",
    "frame",
    "merge_steps",
    "read_metrics",
    "SCHEMA",
    "TOKENS",
    "RolloutWriter",
    "read_rollouts",
    "rollout_file",
    "rollout_steps",
    "rollout_table",
    "sequence_advantages",
    "token_ages",
    "write_rollouts",
    "Filter",
    "Ledger",
    "rollout_writer",
    "Rollouts",
]
