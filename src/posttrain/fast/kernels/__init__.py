"""Kernels of our own, and what runs without them.

Two operations on rows of logits are there in PyTorch (``plain``) and in Triton (``fused``):
``statistics`` is what the forward pass wants of a row, ``gradient`` what the backward pass writes
back. Both forms have the same parameters and the same results; which of them runs is decided here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from posttrain.fast.kernels import plain
from posttrain.models import sampling as plain_sampling
from posttrain.types import Sampling


def form_for(logits: Tensor) -> ModuleType:
    """The form to use for these logits: ``fused`` on a GPU that has Triton, else ``plain``."""
    if logits.is_cuda and logits.dtype == torch.float32 and has_triton():
        return importlib.import_module("posttrain.fast.kernels.fused")
    return plain


def takes(states: Tensor) -> bool:
    """Whether kernels for keys and values take such states: on a GPU, at most float32."""
    return states.is_cuda and states.dtype != torch.float64 and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with PyTorch for CUDA on Linux."""
    return importlib.util.find_spec("triton") is not None


def sample(logits: Tensor, uniforms: Tensor, *, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """As :func:`posttrain.models.sampling.sample`, in one kernel where Triton takes the logits."""
    drawn = sampling.temperature > 0 and not sampling.truncates
    if drawn and logits.is_cuda and logits.dtype == torch.float32 and has_triton():
        from posttrain.fast.kernels.draw import draw

        return draw(logits, uniforms, temperature=sampling.temperature)
    return plain_sampling.sample(logits, uniforms, sampling=sampling)
