"""Memory that passes take: kept between them, and what happens where there is not enough.

A step begins with its gradient cleared and changes no weight before its last micro-batch is done,
so it can be begun again with smaller ones, and is then what it would have been with those from the
start. Models run without dropout, so there is no random state to restore.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from posttrain.models.gpu_memory import empty_cache, ran_out

Result = TypeVar("Result")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as malloc.h numbers them
_SET_BY_USERS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


def keep_freed(device: torch.device) -> None:
    """Have a process that learns on a CPU keep the memory it frees: the next pass takes it again.

    glibc else gives it back to the kernel, which clears every page of it anew: of a small model's
    learning that is a tenth. Blocks above 32 MiB go back as ever. Other C libraries are left as
    they are, and so is what the user has set. A worker process is forked without what was kept.
    """
    if device.type != "cpu" or not _SET_BY_USERS.isdisjoint(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and mallopt(_MMAP_THRESHOLD, 1 << 25):
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def until_it_fits(work: Callable[[], Result], shrink: Callable[[str], None]) -> Result:
    """Do the work; where memory is used up, ``shrink`` what it takes and do it again."""
    while True:
        try:
            return work()
        except Exception as error:
            if not ran_out(error):
                raise
            reason = str(error)
        shrink(reason)  # after the handler: until then the traceback keeps tensors alive


def free(device: torch.device) -> None:
    """Free the memory of a failed attempt."""
    gc.collect()  # autograd graphs with reference cycles
    if device.type == "cuda":
        empty_cache()


def smaller(tokens: int, num_parts: Callable[[int], int], *, reason: str) -> int:
    """The micro-batch size, halved until it really cuts the batch into more parts.

    ``num_parts`` counts the micro-batches of the batch for a size. Raises where the batch cannot
    be cut further: then one sequence alone is too much.

    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     smaller(64, lambda tokens: -(-10 // tokens), reason="")
    8
    """
    before, halved = num_parts(tokens), tokens
    while halved > 1 and num_parts(halved) == before:
        halved //= 2
    if num_parts(halved) == before:
        raise RuntimeError(
            "out of memory with a single sequence (of a reward model: a single set) in a forward "
            f"pass: {reason.strip()}. Set checkpoint_activations = true, shorten max_new_tokens or "
            'the longest rows, set rl.kl.dtype = "bfloat16" or rl.kl.offload = true where there is '
            "a reference model, or take a smaller model"
        )
    warnings.warn(
        f"out of memory: micro_batch_tokens is {halved} from here on, was {tokens}, and the step "
        f"is repeated. The result is that of {halved} from the start. Set micro_batch_tokens = "
        f"{halved} to spare the next run this",
        stacklevel=2,
    )
    return halved


@contextlib.contextmanager
def not_repeated() -> Iterator[None]:
    """Out of memory inside ends the run: some weights have changed, so the step cannot repeat."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise RuntimeError(
            f"out of memory in the optimiser's own step: {str(error).strip()}. Smaller "
            "micro-batches do not help: weights, gradient and AdamW's two moments must fit "
            'together. Free the GPU of other processes, set adam_moments = "8bit", [adapter] '
            "rank = 16, or rl.kl.offload = true where there is a reference model, or take a "
            "smaller model; posttrain plan says what each takes"
        ) from error
