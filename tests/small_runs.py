"""Runs that take a second: a model of two narrow layers, one-digit sums, a handful of steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.algorithms.pieces import asks_teacher
from posttrain.algorithms.table import ALGORITHMS
from posttrain.build.setup import Supplied
from posttrain.config import recipe_from_dict
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.stages.results import Run
from posttrain.stages.run import run

TINY = {"hidden_size": 32, "num_layers": 2, "max_positions": 64}
TASK = {"name": "arithmetic", "operators": "+", "digits": 1, "num_train": 40, "num_test": 10}
RECIPE: dict[str, Any] = {
    "run": {"seed": 1, "deterministic": True},
    "model": {"name": "tiny", "options": TINY},
    "task": TASK,
    # A short warm-up gets no sum right: the length gives every group something to compare.
    "rewards": {"numeric": {"extract": "whole"}, "length": {"target": 1, "per_token": 0.1}},
    "sft": {"wrong_share": 0.5, "epochs": 4, "batch_size": 20, "learning_rate": 3e-3},
    "rl": {
        "algorithm": "grpo",
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "learning_rate": 1e-3,
        "max_new_tokens": 4,
        "check": "off",  # a third of a second, which most of these runs can do without
    },
    "eval": {"problems": 10},
}
RL = {**RECIPE["rl"], "model_options": {"options": TINY}}
"""The same as options of ``posttrain.rl``."""


def recipe(folder: Path, **sections: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe with these sections changed key by key; None removes a section."""
    given = copy.deepcopy(RECIPE)
    given["run"]["folder"] = str(folder)
    for name, changes in sections.items():
        if changes is None:
            del given[name]
        else:
            given.setdefault(name, {}).update(changes)
    return given


def taught(algorithm: str, teacher: str = "tiny") -> dict[str, Any]:
    """The section that an algorithm needs beside ``[rl]``: a teacher, where it asks one."""
    if algorithm not in ALGORITHMS:
        return {}
    row = ALGORITHMS[algorithm]
    pieces = (ADVANTAGES[row.advantage["name"]], POLICY_LOSSES[row.loss["name"]])
    return {"teacher": {"model": teacher}} if asks_teacher(*pieces) else {}


def make_teacher(folder: Path, **options: int) -> str:
    """A model folder with the tokenizer of the tiny model, and weights of its own."""
    made = load_policy("tiny", seed=9, options={**TINY, **options})
    save_policy(made, folder)
    return str(folder)


def small_run(given: dict[str, Any], *, supplied: Supplied | None = None) -> tuple[Run, str]:
    """Run a recipe; the run, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    done = run(recipe_from_dict(given), supplied=supplied, console=console)
    return done, console.file.getvalue()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model folder, as plain transformers reads them; of adapters these alone."""
    if (folder / "adapter_model.safetensors").exists():
        return load_file(folder / "adapter_model.safetensors")
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_weights(first: Path, second: Path) -> bool:
    """Whether two model folders hold the same bits."""
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def timeless(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """Records without what a clock measured, or what befell the graders."""
    left_out = (
        "time/",
        "rollout/tokens_per_second",
        "reward/workers_died",
        "prefer/workers_died",
        "env/wait_share",
        "env/restarts",
    )
    return [{k: v for k, v in record.items() if not k.startswith(left_out)} for record in records]
