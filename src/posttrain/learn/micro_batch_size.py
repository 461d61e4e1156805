"""How many tokens a micro-batch may have: as many as fit. It changes speed, never the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.learn.optim import moment_bytes
from posttrain.learn.ranks import Ranks
from posttrain.learn.trained import Trained
from posttrain.models.cache import context_length
from posttrain.models.gpu_memory import (
    capture_lock,
    empty_cache,
    free_bytes,
    memory_budget,
    ran_out,
)
from posttrain.types import Batch

# A host takes as long to launch the kernels of few tokens as those of many (0.13 s for the thirty
# layers of a SmolLM2-135M), so there should be many. A replayed pass has no such cost: there 16k
# tokens are a fifth quicker than 5k (H200), and are taken where memory is plenty.
LEAST, MOST, MOST_REPLAYED = 1024, 16_384, 5120
PLENTY = 0.5  # of the free memory: a captured pass keeps what it takes
# A CPU is fastest with activations that its caches and malloc keep. In a step of the tiny model
# (128 wide) micro-batches of 1k tokens take a sixth more CPU time than those of 2k, and 4k or 8k
# 1 to 5 % less; a SmolLM2-135M (576 wide) is no slower with 1k than with 4k.
STATES_ON_CPU, MOST_ON_CPU = 2**19, 8192
SHARE = 0.8  # of the free memory: fragments, and batches unlike those tried, have the rest
TRIED = (2048, 4096)
LENGTH = 1024


@dataclass(frozen=True)
class Memory:
    """``bytes = fixed + each · tokens``: what forward and backward take at their peak."""

    fixed: float
    each: float

    @classmethod
    def through(cls, less: tuple[int, int], more: tuple[int, int]) -> Memory:
        """The line through two points (tokens, bytes).

        >>> Memory.through((2, 50), (4, 90))
        Memory(fixed=10.0, each=20.0)
        """
        each = (more[1] - less[1]) / (more[0] - less[0])
        return cls(fixed=max(0.0, less[1] - each * less[0]), each=each)

    def fitting(self, free: float, *, most: int = MOST) -> int:
        """The largest power of two of tokens that takes at most ``free`` bytes, or ``most``.

        Few sizes: a little more or less free memory must not cut batches another way, because
        that would round sums another way.

        >>> Memory(fixed=10.0, each=2.0).fitting(10_000)
        4096
        """
        tokens = LEAST
        while tokens < most and self.fixed + self.each * min(2 * tokens, most) <= free:
            tokens = min(2 * tokens, most)
        return tokens


def made_up(tokens: int, *, vocabulary: int, length: int) -> Batch:
    """A batch of that many tokens, all chosen but for the first of each row. Shapes: [B, T]."""
    rows = max(1, tokens // length)
    numbers = torch.arange(rows * length).view(rows, length) * 7919 % vocabulary
    mask = torch.ones(numbers.shape, dtype=torch.bool)
    mask[:, 0] = False
    return Batch(tokens=numbers, mask=mask, attention=torch.ones_like(mask))


def tokens_on_cpu(width: int) -> int:
    """Tokens of a micro-batch on a CPU, for hidden states of this width: a power of two.

    >>> [tokens_on_cpu(width) for width in (64, 128, 576, 4096)]
    [8192, 4096, 1024, 1024]
    """
    return Memory(fixed=0.0, each=width).fitting(STATES_ON_CPU, most=MOST_ON_CPU)


def tokens_for(
    learning: Sequence[Trained], work: Callable[[Batch], object], *, ranks: Ranks, **beside: bool
) -> int:
    """Tokens of a micro-batch for a policy, and a critic behind it; of all ranks the least fit."""
    model: Any = learning[0].module
    device = next(model.parameters()).device
    if device.type == "cpu":
        config = getattr(model, "config", None)  # a user's own model may have no config
        return tokens_on_cpu(getattr(config, "hidden_size", None) or 1)
    needed = sum(unallocated(part.optimizer) for part in learning) // ranks.size
    found = tokens_on_gpu(device, work, **tried_rows(model), needed=needed, **beside)
    for part in learning:
        part.clear()
    return min(ranks.each(found))


def tried_rows(model: Any) -> dict[str, Any]:
    """What the made-up rows of :func:`tokens_on_gpu` must keep to, for a model."""
    vocabulary = model.config.get_text_config().vocab_size
    return {"vocabulary": vocabulary, "longest": context_length(model)}


def tokens_on_gpu(
    device: torch.device,
    work: Callable[[Batch], object],
    *,
    vocabulary: int,
    longest: int | None = None,
    needed: int = 0,
    beside_sampling: bool = False,
    replayed: bool = False,
) -> int:
    """Tokens of a micro-batch that fit on a GPU, by trying ``work`` (forward and backward) there.

    ``longest`` is the model's context; ``needed`` are bytes that are free now and will be taken
    before long; ``beside_sampling`` leaves what a sampler will take, too. ``replayed`` says that
    passes will be replayed from CUDA graphs. Gradients stay in memory while it is tried, as they
    will in training.
    """
    needed += memory_budget(device) if beside_sampling else 0
    length = min(LENGTH, longest or LENGTH)
    batches = {tokens: made_up(tokens, vocabulary=vocabulary, length=length) for tokens in TRIED}
    points = None
    # At first nothing is measured: compilers try kernels, and choose by the size that they see.
    if _fits(work, batches[TRIED[-1]]):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            points = [_peak(device, work, batch=batch) for batch in batches.values()]
    if points is None:
        empty_cache()  # only now is free what the traceback held
        _fits(work, made_up(LEAST, vocabulary=vocabulary, length=length))
        return LEAST
    return fitting_tokens(Memory.through(*points), free_bytes(device) - needed, replayed=replayed)


def fitting_tokens(memory: Memory, free: float, *, replayed: bool) -> int:
    """Tokens of a micro-batch for passes that take so much, where so many bytes are free."""
    free *= SHARE
    scarce = memory.fixed + memory.each * MOST > PLENTY * free
    return memory.fitting(free, most=MOST_REPLAYED if replayed and scarce else MOST)


def _fits(work: Callable[[Batch], object], batch: Batch) -> bool:
    """Do the work, with all that is compiled and allocated but once; False: memory ran out."""
    try:
        with capture_lock:
            work(batch)
    except Exception as error:
        if not ran_out(error):
            raise
        return False
    return True


def _peak(
    device: torch.device, work: Callable[[Batch], object], *, batch: Batch
) -> tuple[int, int]:
    """Its tokens, and the bytes that the work takes at its peak beyond what is there before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work(batch)
    return batch.tokens.numel(), torch.cuda.max_memory_allocated(device) - before


def unallocated(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the two moments that AdamW makes at its first step; 0 once they are there."""
    if optimizer.state:
        return 0
    weights: list[Tensor] = [w for group in optimizer.param_groups for w in group["params"]]
    own = isinstance(optimizer, torch.optim.AdamW)
    return moment_bytes(weights, "full" if own else "8bit")
