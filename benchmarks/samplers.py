"""What an engine that samples must do to be measured, and ours behind that interface.

Each holds its own copy of the weights, so none can disturb another. ``sample`` gives the seconds it
took and the length of every completion, prompt by prompt. What a user would pay only once (start,
memory, compilation, capture) happens before the clock starts, in ``prepare`` or in a first call
that is not counted.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from roofline import synchronize
from torch import Tensor
from transformers import GenerationConfig

from posttrain.build.threads import BESIDE_GPU
from posttrain.rollout.engines.native import NativeEngine
from posttrain.types import Prompt, Rollout, Sampling


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is sampled: ``group`` completions for each prompt.

    ``end_tokens`` end a completion; None: the tokenizer's own, none: all are as long as they may.
    """

    prompts: Sequence[tuple[int, ...]]
    group: int
    new_tokens: int
    end_tokens: tuple[int, ...] | None = None

    @property
    def rows(self) -> list[list[int]]:
        """One prompt for each completion."""
        return [list(prompt) for prompt in self.prompts for _ in range(self.group)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every engine starts from: a float32 model on the CPU, where to run, and how exactly."""

    model: Any
    tokenizer: Any
    device: str
    compute: torch.dtype
    caches: Sequence[str] = ("dynamic",)
    folder: Path | None = None  # where the model can be read from; vLLM alone asks

    def own_model(self, dtype: torch.dtype) -> Any:
        """A copy on the device."""
        return copy.deepcopy(self.model).to(device=self.device, dtype=dtype).eval()

    def generation(self, job: Job, **settings: Any) -> GenerationConfig:
        """Plain sampling from the whole distribution, for transformers."""
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.new_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            **settings,
        )


class Sampler(Protocol):
    """An engine in the race."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights of the same shape."""

    def prepare(self, job: Job) -> str:
        """Make room for a job; what was chosen, in a few words."""

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        """Seconds, and the length of every completion, its end token counted."""

    def close(self) -> None:
        """Give memory back."""


class Native:
    """posttrain's own engine: float32 master weights, computing as the learner does."""

    def __init__(self, setup: Setup, *, compiled: bool) -> None:
        if compiled and setup.device == "cpu":
            raise RuntimeError("layers are compiled on a GPU only")
        self._device = setup.device
        self._model = setup.own_model(torch.float32)
        self._engine_with = functools.partial(
            NativeEngine,
            self._model,
            decode=lambda tokens: "",  # the others give tokens, not text
            compute=None if setup.compute == torch.float32 else setup.compute,
            compiled=compiled,
        )
        self._engine = self._engine_with(end_tokens=[setup.tokenizer.eos_token_id])
        self.found: list[list[Rollout]] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def prepare(self, job: Job) -> str:
        if job.end_tokens is not None and job.end_tokens != self._engine.end_tokens:
            del self._engine  # its memory goes before that of the next one comes
            free(self._device)
            self._engine = self._engine_with(end_tokens=job.end_tokens)
        return "log-probs returned"

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        prompts = [Prompt(id=str(n), text="", tokens=p) for n, p in enumerate(job.prompts)]
        sampling = Sampling(max_new_tokens=job.new_tokens)
        with timed(self._device) as taken:
            self.found = self._engine.generate(prompts, sampling, num_samples=job.group, seed=seed)
        return taken[0], [len(one.tokens) for group in self.found for one in group]

    def close(self) -> None:
        del self._engine, self._engine_with, self._model
        free(self._device)


def set_threads(device: str) -> None:
    """Beside a GPU the CPU gets as few threads as in every run."""
    if device == "cuda":
        torch.set_num_threads(min(torch.get_num_threads(), BESIDE_GPU))


@contextlib.contextmanager
def timed(device: str) -> Iterator[list[float]]:
    """The list has the seconds of the block, once it is over."""
    taken: list[float] = []
    synchronize(device)
    began = time.perf_counter()
    yield taken
    synchronize(device)
    taken.append(time.perf_counter() - began)


def free(device: str) -> None:
    """What no one holds any more goes back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
