"""A piece of one's own that returns or takes the wrong thing: the error names it and the remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run

from posttrain.check import check_recipe
from posttrain.config import recipe_from_dict, resolve

MODULE = """
from posttrain.types import Terms

def tensor(batch):
    return batch.rewards

def unchanged(batch):
    return batch

def nothing(batch):
    batch.replace(advantages=batch.tokens.float())

def tensor_loss(logprobs, batch):
    return (-batch.advantages * logprobs).sum()

def mean_loss(logprobs, batch):
    return Terms(loss=(-batch.advantages * logprobs).mean())

def one_argument(logprobs):
    return Terms(loss=-logprobs)

def two_arguments(batch, rewards):
    return batch
"""
RETURNED = [
    ("advantage", "tensor", "a Tensor of shape [8]", "batch.replace(advantages=…)"),
    ("advantage", "unchanged", "the batch without advantages", "batch.replace(advantages=…)"),
    ("advantage", "nothing", "None", "batch.replace(advantages=…)"),
    ("weights", "tensor", "a Tensor of shape [8]", "batch.replace(weights=…)"),
    ("weights", "unchanged", "the batch without weights", "batch.replace(weights=…)"),
    ("loss", "tensor_loss", "a Tensor of shape []", "Terms(loss=…) with a term for every token"),
    ("loss", "mean_loss", "Terms(loss=a Tensor of shape [])", "Terms(loss=…) with a term for"),
]
TAKEN = [
    ("loss", "one_argument", "too many positional arguments", "one_argument(logprobs, batch)"),
    ("advantage", "two_arguments", "missing a required argument: 'rewards'", "(batch)"),
    ("weights", "tensor_loss", "missing a required argument: 'batch'", "tensor_loss(batch)"),
    ("critic.loss", "tensor", "too many positional arguments", "tensor(values, batch)"),
]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_wrong_pieces.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def given(folder: Path, piece: str, function: str) -> dict[str, Any]:
    rl = {"algorithm": "grpo", "steps": 1, "prompts_per_step": 2, "group_size": 4}
    rl |= {"max_new_tokens": 4, "check": "off", piece: f"my_wrong_pieces:{function}"}
    return recipe(folder, sft=None, eval=None, rl=rl)


@pytest.mark.parametrize(("piece", "function", "returned", "expected"), RETURNED)
def test_what_a_piece_returns_is_named_with_what_it_should(
    piece: str, function: str, returned: str, expected: str, tmp_path: Path
) -> None:
    said = rf"my_wrong_pieces:{function} returned {re.escape(returned)}; it has to .*"
    with pytest.raises(ValueError, match=said + re.escape(expected)):
        small_run(given(tmp_path / "run", piece, function))


def test_a_check_says_so_too(tmp_path: Path) -> None:
    report = check_recipe(given(tmp_path / "run", "weights", "tensor"), fast=True)
    failed = [line.text for line in report.lines if line.state == "fail"]
    assert any("my_wrong_pieces:tensor returned a Tensor" in text for text in failed), failed


@pytest.mark.parametrize(("piece", "function", "error", "called"), TAKEN)
def test_what_a_piece_takes_is_looked_at_before_anything_is_loaded(
    piece: str, function: str, error: str, called: str
) -> None:
    name = f"my_wrong_pieces:{function}"
    change: dict[str, Any] = {piece: name}
    if "." in piece:
        change = {"algorithm": "ppo", "critic": {"loss": name}}
    said = rf"rl\.{piece} '{name}': {re.escape(error)}; it is called as .*{re.escape(called)}, and"
    with pytest.raises(ValueError, match=said):
        resolve(recipe_from_dict({"rl": change, "task": "sort"}))
