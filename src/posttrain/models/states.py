"""The hidden state before each chosen token: all that log-probs and values are made of.

Where the model allows it the batch is packed: nothing is spent on padding, and the prompt of a
group is computed once for all its members. The numbers and the gradients are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.algorithms import ops
from posttrain.models.attention import attending
from posttrain.models.block_attention import Flash, Padded, Plain
from posttrain.models.gathered_attention import packed_attention
from posttrain.models.head import logits_are_head_of_states, trunk_states
from posttrain.models.packing import Packing, pack
from posttrain.models.recorded_pass import recordings_of
from posttrain.models.replaceable import full_precision, relative_errors, replaceable
from posttrain.types import Batch
from posttrain.types.devices import send
from posttrain.types.prompts import spans

if TYPE_CHECKING:
    from posttrain.models.shared_prompt import Make

_VERDICT = "_posttrain_rows_can_be_packed"
_HALF = (torch.bfloat16, torch.float16)
# Packed attention costs a CPU a little more per token than plain rows do.
_WORTHWHILE = 0.9


def states_before(trunk: nn.Module, batch: Batch) -> Tensor:
    """The last hidden state before each chosen token, in the order of ``batch.tokens[batch.mask]``.

    ``trunk`` is a decoder without a head. Shapes: tokens [B, T] → [M, D], M tokens are chosen.
    """
    make = kernel_for(trunk, batch)
    if make is not None:
        found = spans(batch.host)
        # Nothing is chosen; or the first token of a sequence is, and its state is 0 by convention.
        strange = not any(found.end) or 0 in (
            first for first, end in zip(found.first, found.end, strict=True) if end
        )
        packing = None if strange else pack(batch.host, found)
        recordings = recordings_of(trunk) if make is Flash else None
        if packing is not None and recordings is not None:
            return recordings.states(batch.tokens, packing)
        if packing is not None and (make is Flash or _saves(packing, batch)):
            return packed_states(trunk, batch.tokens, packing=packing, make=make)
    return ops.shift(trunk_states(trunk, batch.tokens))[batch.mask]


def _saves(packing: Packing, batch: Batch) -> bool:
    return len(packing.source) <= _WORTHWHILE * batch.tokens.numel()


def packed_states(
    trunk: nn.Module, tokens: Tensor, *, packing: Packing, make: Make = Plain
) -> Tensor:
    """The states of ``packing.before``, from one packed row. Shapes: [B, T] → [M, D]."""
    attention = packed_attention(packing, like=tokens, make=make)
    model: Any = trunk
    source, positions, before = (
        send(places, tokens.device)
        for places in (packing.source, packing.positions, packing.before)
    )
    row = tokens.flatten()[source][None]
    with attending(model, attention):
        states: Tensor = model(
            input_ids=row,
            position_ids=positions[None],
            attention_mask=torch.ones_like(row),  # all real: keeps models from guessing by ids
            use_cache=False,
        ).last_hidden_state
    return states.squeeze(0)[before]


def shares_prompts(model: nn.Module, batch: Batch) -> bool:
    """Whether log-probs of this language model, or states of this trunk, need no padded rows."""
    if not isinstance(model, PreTrainedModel):
        return False
    if model.get_output_embeddings() is not None:
        few = batch.tokens[:1, :8].to(model.device)
        if not logits_are_head_of_states(model, few):
            return False
    trunk: Any = model.get_decoder()
    return kernel_for(trunk, batch) is not None


def kernel_for(trunk: nn.Module, batch: Batch) -> Make | None:
    """The kernel with which this trunk computes the batch packed; None: it cannot."""
    if not isinstance(trunk, PreTrainedModel) or _computes_layers_again(trunk):
        return None  # outside of our attention
    config: Any = trunk.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if any(limit is not None and limit < batch.tokens.shape[1] for limit in limits):
        return None
    kernels: dict[str, Make] = {"cpu": Padded, "cuda": Flash}
    make = kernels.get(trunk.device.type)
    if make is Flash and not _suits_flash(trunk, config):
        return None
    return make if make is not None and can_be_packed(trunk) else None


def _computes_layers_again(trunk: nn.Module) -> bool:
    """As ``is_gradient_checkpointing``, which looks at every module, and takes milliseconds."""
    layers = (layer for child in trunk.children() for layer in child.children())
    return any(getattr(module, "gradient_checkpointing", False) for module in (trunk, *layers))


def _suits_flash(trunk: PreTrainedModel, config: Any) -> bool:
    """Half precision, and heads of a size that the kernel has."""
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    if torch.cuda.get_device_capability(trunk.device) < (8, 0):
        return False
    autocast = torch.is_autocast_enabled("cuda")
    compute = torch.get_autocast_dtype("cuda") if autocast else trunk.dtype
    if getattr(config, "v_head_dim", None):  # compressed keys: values of another size
        return False
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return compute in _HALF and size % 8 == 0 and size <= 256


def can_be_packed(trunk: PreTrainedModel) -> bool:
    """Whether this trunk gives the same hidden states for a packed batch.

    Compared once on a few tokens, and remembered on the module: a model may carry more from token
    to token than attention (a convolution, a recurrence), and that would run across sequences.
    """
    if not hasattr(trunk, _VERDICT):
        with full_precision(trunk.device):
            setattr(trunk, _VERDICT, replaceable(trunk) and _compare(trunk))
    return bool(getattr(trunk, _VERDICT))


def _compare(trunk: PreTrainedModel) -> bool:
    config = trunk.config.get_text_config()
    length = min(12, getattr(config, "max_position_embeddings", None) or 12)
    if length < 4:
        return False
    tokens = torch.arange(3 * length, device=trunk.device).reshape(3, -1) * 7 % config.vocab_size
    prompt = length // 2 - 1
    tokens[1, :prompt] = tokens[0, :prompt]
    mask = torch.zeros(tokens.shape, dtype=torch.bool, device=trunk.device)
    mask[:, prompt:] = True
    batch = Batch(tokens=tokens, mask=mask)
    packing = pack(batch, spans(batch))
    others = tokens.clone()
    others[:2] = (tokens[:2] + 1) % config.vocab_size
    expected = ops.shift(trunk_states(trunk, tokens))[mask]
    try:
        found, beside = (packed_states(trunk, row, packing=packing) for row in (tokens, others))
    except NotImplementedError:  # a window shorter than even these few tokens
        return False
    # What runs across sequences changes the first tokens after another one by about 1. What else
    # may be wrong (positions that a model counts itself) changes most of them, where rounding in
    # half precision may change a few as much.
    last = slice(-int(mask[2].sum()), None)
    apart = relative_errors(beside[last], found[last]) < 0.01
    same = relative_errors(found, expected).median() < max(0.01, 64 * torch.finfo(found.dtype).eps)
    return bool(apart.all() and same)
