"""Other engines that sample: transformers' two, and vLLM where it is installed.

Each at its best: half precision where the device has it, the whole distribution (top_k = 0), no
log-probs where they cost extra (ours and vLLM's come with every token).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from samplers import Job, Setup, free, timed
from torch import Tensor

from posttrain.types import Prompt, Rollout, Turn

SHARE_OF_MEMORY = 0.25  # for an engine that would else take all: several live side by side
PATIENCE = 60.0  # seconds until an engine that answers nothing is given up


class Generate:
    """transformers' ``generate``, with the cache that is the fastest on the first job."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = setup.own_model(setup.compute)
        self._cache = setup.caches[0] if len(setup.caches) == 1 else None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def prepare(self, job: Job) -> str:
        if self._cache is None:
            trials: dict[str, float] = {}
            for cache in self._setup.caches:
                self._cache = cache
                self.sample(job, seed=0)
                trials[cache] = self.sample(job, seed=0)[0]
            self._cache = min(trials, key=trials.__getitem__)
        return f"{self._cache} cache"

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        torch.manual_seed(seed)
        width = max(map(len, job.prompts))
        end, pad = self._setup.tokenizer.eos_token_id, self._setup.tokenizer.pad_token_id
        rows = [[pad] * (width - len(row)) + row for row in job.rows]
        real = [[0] * (width - len(row)) + [1] * len(row) for row in job.rows]
        device = self._setup.device
        cache = {} if self._cache == "dynamic" else {"cache_implementation": self._cache}
        with timed(device) as taken:
            tokens = self._model.generate(
                input_ids=torch.tensor(rows, device=device),
                attention_mask=torch.tensor(real, device=device),
                generation_config=self._setup.generation(job, **cache),
            )[:, width:].cpu()
        ends = tokens == end
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1])
        return taken[0], lengths.tolist()

    def close(self) -> None:
        del self._model
        free(self._setup.device)


class ContinuousBatching:
    """transformers' ``generate_batch``: its manager is kept, and only stands by between calls.

    ``generate_batch`` itself starts a thread and collects garbage at every call; that is left out.
    A thread that stays could disturb another engine that records a CUDA graph, so it does not.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = setup.own_model(setup.compute)
        self._settings: dict[str, Any] = {}
        self._attention = ""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def prepare(self, job: Job) -> str:
        from transformers import ContinuousBatchingConfig

        self._forget()
        room: dict[str, Any] = {"max_memory_percent": SHARE_OF_MEMORY}
        if self._setup.device == "cpu":  # where it cannot ask for the free memory
            longest = max(map(len, job.prompts)) + job.new_tokens
            room = {"num_blocks": len(job.rows) * -(-longest // 256) + 8, "max_batch_tokens": 2048}
        self._settings = {
            "generation_config": self._setup.generation(job),
            "continuous_batching_config": ContinuousBatchingConfig(**room),
            "persistent_manager": True,
        }
        # Through the front door once: it sizes the manager for the job.
        found = self._model.generate_batch(job.rows, progress_bar=False, **self._settings)
        _check(found, len(job.rows))
        self.sample(job, seed=0)
        return f"attention {self._attention}"

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        torch.manual_seed(seed)
        rows = job.rows
        found: dict[str, Any] = {}
        standing_by = self._model.continuous_batching_context_manager(**self._settings)
        with standing_by as manager, timed(self._setup.device) as taken:
            self._attention = self._model.config._attn_implementation
            names = manager.add_requests(inputs=rows, max_new_tokens=job.new_tokens)
            patience = time.monotonic() + PATIENCE
            while len(found) < len(rows):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif not manager.is_running() or time.monotonic() > patience:
                    break
        _check(found, len(rows))
        return taken[0], [len(found[name].generated_tokens) for name in names]

    def close(self) -> None:
        self._forget()
        del self._model
        free(self._setup.device)

    def _forget(self) -> None:
        forget = getattr(self._model, "destroy_cached_continuous_batching_manager", None)
        if forget is not None:
            forget()
        free(self._setup.device)


def _check(found: Mapping[str, Any], wanted: int) -> None:
    """Raise with the first reason unless every request was answered."""
    errors = [result.error for result in found.values() if result.error is not None]
    if errors or len(found) < wanted:
        raise RuntimeError(f"{len(found)} of {wanted} answered, {len(errors)} errors: {errors[:1]}")


class Vllm:
    """vLLM, where it is installed; CUDA graphs and compilation as it chooses."""

    def __init__(
        self, setup: Setup, *, logprobs: bool = True, share: float = SHARE_OF_MEMORY, **more: Any
    ) -> None:
        import vllm  # noqa: F401 - if it is not there, say so now

        self._setup = setup
        self.logprobs = logprobs
        self._options = {"gpu_memory_utilization": share, "max_num_seqs": 1024, **more}
        self._weights: Mapping[str, Tensor] | None = None
        self._engine: Any = None
        self.found: list[list[Rollout]] = []  # where it was asked for log-probs

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._stop()

    def prepare(self, job: Job) -> str:
        if self._engine is None:
            self._start()
        return "log-probs returned" if self.logprobs else "no log-probs"

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._setup.folder
            if folder is None or self._weights is not None:
                folder = Path(name)
                weights = self._weights or self._setup.model.state_dict()
                self._setup.model.save_pretrained(folder, state_dict=dict(weights))
                self._setup.tokenizer.save_pretrained(folder)
            self._engine = self._read(folder)

    def _read(self, folder: Path) -> Any:
        from transformers import AutoConfig
        from vllm import LLM

        positions = AutoConfig.from_pretrained(folder).max_position_embeddings
        options = {"max_model_len": positions, **self._options}
        return LLM(
            model=str(folder),
            dtype=str(self._setup.compute).removeprefix("torch."),
            enforce_eager=self._setup.device == "cpu",
            logprobs_mode="processed_logprobs",
            **options,
        )

    def sample(self, job: Job, seed: int) -> tuple[float, list[int]]:
        """A seed for each request would make it slower: it has the one it started with."""
        from vllm import SamplingParams

        ends = job.end_tokens
        settings = SamplingParams(
            n=job.group,
            temperature=1.0,
            top_p=1.0,
            top_k=0,  # all of them, whatever the model's generation config says
            max_tokens=job.new_tokens,
            ignore_eos=ends == (),
            stop_token_ids=list(ends or ()),
            logprobs=0 if self.logprobs else None,  # 0: of the token drawn, and no others
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in job.prompts]
        self._engine.reset_prefix_cache()  # as after every update of the weights
        with timed(self._setup.device) as taken:
            found = self._engine.generate(prompts, settings, use_tqdm=False)
        if self.logprobs:
            self.found = [rollouts(*one) for one in zip(job.prompts, found, strict=True)]
        return taken[0], [len(one.token_ids) for answer in found for one in answer.outputs]

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._engine = None
        free(self._setup.device)


def rollouts(prompt: tuple[int, ...], answer: Any) -> list[Rollout]:
    """What vLLM answered to a prompt, as our engines answer."""
    asked = Prompt(id="0", text="", tokens=prompt)
    found = []
    for one in answer.outputs:
        drawn = tuple(one.token_ids)
        own = tuple(at[token].logprob for token, at in zip(drawn, one.logprobs, strict=True))
        turn = Turn(tokens=drawn, text="", logprobs=own)
        found.append(Rollout(prompt=asked, turns=(turn,), group=0))
    return found
