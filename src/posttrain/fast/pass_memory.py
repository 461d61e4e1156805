"""What a forward and backward pass keeps in memory, counted on tensors without numbers.

The first layers of a model run with fake tensors, which have shapes and no memory, through the
attention that learning goes through; every storage is counted while it is there. For a layer of
Llama or Qwen2 (D hidden, I intermediate, H heads and K key heads of size S; float32 weights,
bfloat16 arithmetic) autograd keeps of each token, in bytes::

    eager      26·D + 8·I + 4·(H + K)·S + 4·H + 8
    compiled   10·D + 6·I + 4·(H + K)·S + 4·H + 8

Eager are the input of each norm and what it multiplies by its weight (16·D, float32 as the residual
stream is), five casts of those for matrix products (10·D), gate, its activation, up and their
product (8·I), queries, keys, values and what attention made of them with its log-sum-exp. A
compiler computes norms, casts and activations again, and keeps the layer's input (4·D), one input
for each group of products (4·D), the attention's projection (2·D), gate, up and their product
(6·I).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.fast.attention.blockwise import Gradients
from posttrain.fast.attention.gather_kv import KeyLayout
from posttrain.fast.attention.gathered import Gathered, GatheredPrompts
from posttrain.fast.attention.interface import attending
from posttrain.fast.attention.shared_prompt import Blocks, SharedAttention
from posttrain.fast.cast_copy import Aliases
from posttrain.fast.token_scores import chunk_elements_for, kept_elements_for
from posttrain.models.adapters import adapted_layers
from posttrain.models.head import HALF

__all__ = ["Aliases", "LinearBytes", "PassMemory", "id_of", "pass_memory", "scoring_bytes"]
LAYERS = (2, 3)  # traced: what the third adds, every other adds too
TOKENS = (2**16, 2**17)  # many: else the gradient of the embedding, at the end, would be the peak
NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj")


class LinearBytes(NamedTuple):
    """``fixed + each · tokens`` bytes."""

    fixed: float
    each: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.each * tokens

    def __add__(self, other: Any) -> LinearBytes:
        return LinearBytes(self.fixed + other.fixed, self.each + other.each)

    def times(self, factor: float) -> LinearBytes:
        """So many of it."""
        return LinearBytes(self.fixed * factor, self.each * factor)


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Bytes of passes of a trunk: what forward keeps for backward, and what comes on top.

    ``passing`` is there for a moment while gradients are computed, ``asked`` is all of a pass
    without gradient.
    """

    kept: LinearBytes
    passing: LinearBytes
    asked: LinearBytes


def pass_memory(
    make: Callable[[int], Any],
    layers: int,
    *,
    compute: torch.dtype,
    device: str,
    keys: float = 1.0,
    compiled: bool = False,
    cast_before: bool = False,
) -> PassMemory:
    """Passes of a trunk of so many ``layers``; ``make`` gives a model of the first few of them.

    ``keys`` are the keys that are gathered for each token. ``cast_before`` says that weights are
    kept in the type of the arithmetic, beside the passes.
    """
    given: dict[str, Any] = {"compute": compute, "keys": keys if device == "cuda" else None}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fewer, model = (make(count) for count in LAYERS)
            first = _line([_traced(fewer, tokens, **given)[0] for tokens in TOKENS])
            both = [_traced(model, tokens, backward=True, **given) for tokens in TOKENS]
            asked = _traced(model, TOKENS[0], learns=False, **given)[1]
    except NotImplementedError as error:
        raise ValueError(
            f"model: {error} is not counted, so what its passes take is not known; try a few steps "
            "with run.gpu_memory set to what there is"
        ) from error
    second = _line([now for now, _ in both])
    layer = second + first.times(-1)
    rest = first + layer.times(-LAYERS[0])
    each = compiled_bytes(model, compute) if compiled else None
    layer = layer if each is None else LinearBytes(layer.fixed, each)
    kept = rest + layer.times(layers)
    return PassMemory(
        kept=LinearBytes(0.0, kept.each) if cast_before else kept,
        passing=_line([most - now for now, most in both]),
        asked=LinearBytes(0.0, asked / TOKENS[0]),
    )


def _line(points: list[int]) -> LinearBytes:
    """The line through what was counted for the two numbers of tokens."""
    less, more = points
    each = (more - less) / (TOKENS[1] - TOKENS[0])
    return LinearBytes(less - each * TOKENS[0], each)


def _traced(
    model: Any,
    tokens: int,
    *,
    compute: torch.dtype,
    keys: float | None,
    learns: bool = True,
    backward: bool = False,
) -> tuple[int, int]:
    """Bytes after a forward pass, and at the peak, with ``backward`` of both passes."""
    trunk, live = model.get_decoder(), _Live()
    for weight in trunk.parameters():  # gradients are there already: they are counted elsewhere
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    half = torch.autocast("cpu", torch.bfloat16, compute in HALF, cache_enabled=False)
    with live, half, _attention(trunk, tokens, keys=keys), torch.set_grad_enabled(learns):
        row = torch.zeros(1, tokens, dtype=torch.long)
        states = trunk(
            input_ids=row,
            position_ids=torch.zeros_like(row),
            attention_mask=torch.ones_like(row),
            use_cache=False,
        ).last_hidden_state
        now = live.now
        if backward:
            states.backward(torch.empty_like(states))
        most = live.most
    return now, most


@contextlib.contextmanager
def _attention(trunk: Any, tokens: int, *, keys: float | None) -> Iterator[None]:
    """Attention of packed rows: of gathered keys, as on a GPU; None: as on a CPU."""
    if keys is None:
        with attending(trunk, _OnCpu()):
            yield
        return
    at = torch.arange(int(keys * tokens), dtype=torch.int32)
    begins = torch.zeros(tokens + 1, dtype=torch.int32)
    layout = KeyLayout(at=at, order=at, begins=begins)
    with attending(trunk, GatheredPrompts(Gathered(kernel=_Sizes(), layout=layout))):
        yield


class _OnCpu:
    """Attention of a packed row on a CPU, which has a key for each head of queries."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """See :class:`posttrain.fast.attention.interface.Attention`."""
        blocks = Blocks(_Sizes(), completions_begin=query.shape[2])
        return SharedAttention.mix((query, key, value), blocks, scale=options["scale"])


class _Sizes:
    """Results of flash attention, without the numbers."""

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`posttrain.fast.attention.blockwise.Kernel`."""
        tokens, heads, _ = query.shape
        return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], **_: Any
    ) -> Gradients:
        """See :class:`posttrain.fast.attention.blockwise.Kernel`."""
        first, second, third = (torch.empty_like(part) for part in inputs)
        return first, second, third


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages made inside while they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {id_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(found):
            if not isinstance(tensor, Tensor):
                continue
            storage, number = tensor.untyped_storage(), id_of(tensor)
            if number not in given and number not in self._sizes:
                self._sizes[number] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, number)
        return found

    def _free(self, number: int) -> None:
        self.now -= self._sizes.pop(number, 0)


def id_of(tensor: Tensor) -> int:
    """What two tensors on the same storage have in common."""
    return int(tensor.untyped_storage()._cdata)


def compiled_bytes(model: Any, compute: torch.dtype) -> float | None:
    """Bytes a token that one compiled layer keeps, see above; None: a layer of another kind.

    An adapter adds its low product; norms of queries and keys what they normalise.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not layers:
        return None
    names = {name.rpartition(".")[2]: part for name, part in _named(layers[0])}
    linears = {name: names[name] for name in (*ATTENTION, *FEED_FORWARD) if name in names}
    norms = [name for name in names if "norm" in name]
    beside = [name for name in norms if name in ("q_norm", "k_norm")]
    if len(linears) < 6 or len(norms) - len(beside) != len(NORMS):
        return None
    config = model.config.get_text_config(decoder=True)
    half = 2 if compute in HALF else 4
    wide = next(model.parameters()).element_size()  # of the residual stream: the embedding's
    outs = {name: part.out_features for name, part in linears.items()}
    width, heads = linears["q_proj"].in_features, config.num_attention_heads
    mixed = outs["q_proj"] + outs["k_proj"] + outs["v_proj"] + linears["o_proj"].in_features
    numbers = 3 * width + mixed + 3 * outs["gate_proj"]
    numbers += outs["q_proj"] + outs["k_proj"] if beside else 0
    numbers += sum(len(each.adapter.A) for each in adapted_layers(layers[0]).values())
    return wide * width + half * numbers + 4 * heads + 4 * len(norms)


def _named(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in layer.named_modules():
        if isinstance(part, nn.Linear) or "norm" in name.rpartition(".")[2]:
            yield name, part


def scoring_bytes(
    rows: int, *, head: Tensor, compute: torch.dtype, gradient: bool, device: str, memory: float
) -> float:
    """Bytes of log-probs of so many tokens, at the peak of their ``gradient`` where that is wanted.

    A chunk of logits in float32 and its gradient, the head [V, D] in the type of the arithmetic,
    its own gradient in float32 where it learns, and the states with their gradient. Where all
    logits take a small share of the device's ``memory``, they are kept for the gradient.
    """
    vocabulary, width = head.shape
    kind, logits = torch.device(device), rows * vocabulary
    chunk = min(chunk_elements_for(kind, memory=memory), logits)
    kept = gradient and logits <= kept_elements_for(kind, memory=memory)
    states = rows * width * compute.itemsize
    found = 4 * (logits if kept else chunk) + states
    found += vocabulary * width * compute.itemsize if head.dtype != compute else 0
    if gradient:
        found += chunk * compute.itemsize + states
        found += 4 * vocabulary * width if head.requires_grad else 0
    return float(found)
