"""What watches over a run: its folder is its own, skipped batches are kept, kernels are steady."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.build.threads import own_threads
from posttrain.config import Optimiser, Resolved
from posttrain.distributed.connect import check_asked
from posttrain.learn.batch_file import batch_tensors, write_batch
from posttrain.models.quiet import compiler_explained
from posttrain.pipelines.guard import Guard, Guarded, Skipped
from posttrain.protocols import Learner
from posttrain.runs import replacing, write_json
from posttrain.runs.keeper import Keeper
from posttrain.runs.lock import held
from posttrain.types import Batch

Decode = Callable[[Sequence[int]], str]
MOST_KEPT = 20  # batches of a stage: the first ones tell, and a disk has an end
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def guarded(recipe: Resolved) -> Iterator[None]:
    """A whole run: nobody else writes into its folder, and its kernels are those it asked for.

    A cluster that cannot be had is refused first: the folder stays as it was.
    """
    check_asked(recipe)
    steady = deterministic(recipe.run.deterministic)
    with held(recipe.run.folder), steady, compiler_explained(), own_threads():
        yield


def guard_learner(
    learner: Learner, section: Optimiser, *, keeper: Keeper, decode: Decode
) -> Guarded:
    """A learner whose skipped batches are kept in the folder ``skipped`` of its stage."""
    place = keeper.folder.path / "skipped"
    guard = Guard(most=section.max_skipped, keep=_Skipped(place, decode), where=str(place))
    return Guarded(learner, keeper.save_counts_of(guard))


@dataclass
class _Skipped:
    """Writes ``step-000012/minibatch-1.safetensors``, and what can be read in a ``.json``."""

    folder: Path
    decode: Decode

    def __call__(self, skipped: Skipped) -> None:
        if len(list(self.folder.glob("*/*.json"))) >= MOST_KEPT:
            return
        place = self.folder / f"step-{skipped.step:06d}"
        with replacing(place / f"minibatch-{skipped.number}.safetensors") as beside:
            write_batch(beside, skipped.batch)
        result = skipped.result
        note = {
            "step": skipped.step,
            "minibatch": skipped.number,
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "metrics": dict(result.metrics),
            "not_finite": _not_finite(skipped.batch),
            "sequences": _sequences(skipped.batch, self.decode),
        }
        write_json(place / f"minibatch-{skipped.number}.json", note)


def _not_finite(batch: Batch) -> dict[str, int]:
    """How many entries of each field are NaN or infinite; fields without one are left out."""
    floating = {n: t for n, t in batch_tensors(batch).items() if t.is_floating_point()}
    counts = {name: int((~torch.isfinite(tensor)).sum()) for name, tensor in floating.items()}
    return {name: count for name, count in counts.items() if count}


def _sequences(batch: Batch, decode: Decode) -> list[dict[str, Any]]:
    """Each sequence in words: its text, what of it the policy chose, and its largest numbers."""
    real = batch.mask if batch.attention is None else batch.attention
    rows = []
    for row, tokens in enumerate(batch.tokens):
        row_batch = batch.select(torch.tensor([row]))
        facts: dict[str, Any] = {
            "text": decode(tokens[real[row]].tolist()),
            "chosen": decode(tokens[batch.mask[row]].tolist()),
            "tokens": int(real[row].sum()),
        }
        if batch.rewards is not None:
            facts["reward"] = float(batch.rewards[row])
        inferred = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
        for name in ("advantages", "sampler_logprobs", *inferred):
            tensor: Tensor | None = getattr(row_batch, name)
            if tensor is not None and bool(row_batch.mask.any()):
                chosen = tensor[row_batch.mask]
                facts[name] = {"least": float(chosen.min()), "most": float(chosen.max())}
        rows.append({**facts, "not_finite": _not_finite(row_batch)})
    return rows


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only kernels that give the same bits every time, and afterwards what there was before."""
    if not wanted:
        yield
        return
    if torch.cuda.is_initialized() and CUBLAS not in os.environ:
        warnings.warn(
            f"run.deterministic: the GPU was in use before this run, and cuBLAS reads {CUBLAS} "
            f"only once; set {CUBLAS}=:4096:8 in the environment before Python starts",
            stacklevel=3,
        )
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (cudnn.deterministic, cudnn.benchmark),
        os.environ.get(CUBLAS),
    )
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        enabled, only_warn, (cudnn.deterministic, cudnn.benchmark), workspace = before
        torch.use_deterministic_algorithms(enabled, warn_only=only_warn)
        if workspace is None:
            os.environ.pop(CUBLAS, None)
