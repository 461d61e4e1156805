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
from posttrain.fast.attention.blockwise import Flash, Padded, Plain
from posttrain.fast.attention.gathered import packed_attention
from posttrain.fast.attention.interface import attending
from posttrain.fast.attention.replaceable import relative_errors, replaceable
from posttrain.fast.captured_pass import passes_of
from posttrain.fast.packing import Packing, pack
from posttrain.models import head
from posttrain.models.head import full_precision, logits_are_head_of_states, trunk_states
from posttrain.types import Batch
from posttrain.types.batch import send, spans
from posttrain.types.ways import Support, remembered

if TYPE_CHECKING:
    from posttrain.fast.attention.shared_prompt import Make

_VERDICT = "_posttrain_rows_can_be_packed"
# Packed attention costs a CPU a little more per token than plain rows do.
_WORTHWHILE = 0.9
_KERNELS: dict[str, Make] = {"cpu": Padded, "cuda": Flash}


def states_before(trunk: nn.Module, batch: Batch) -> Tensor:
    """As :func:`posttrain.models.head.states_before`, packed where the trunk allows it."""
    make = kernel_for(trunk, batch)
    if make is not None:
        found = spans(batch.host)
        # No token is chosen, or one is the first of its sequence, whose state is 0 by convention.
        strange = not any(found.end) or 0 in (
            first for first, end in zip(found.first, found.end, strict=True) if end
        )
        packing = None if strange else pack(batch.host, found)
        captured = passes_of(trunk) if make is Flash else None
        if packing is not None and captured is not None:
            return captured.states(batch.tokens, packing)
        if packing is not None and (make is Flash or _saves(packing, batch)):
            return packed_states(trunk, batch.tokens, packing=packing, make=make)
    return head.states_before(trunk, batch)


def _saves(packing: Packing, batch: Batch) -> bool:
    return len(packing.source) <= _WORTHWHILE * batch.tokens.numel()


def packed_states(
    trunk: nn.Module, tokens: Tensor, *, packing: Packing, make: Make = Plain
) -> Tensor:
    """The states of ``packing.before``, from one packed row. Shapes: [B, T] → [M, D]."""
    attention = packed_attention(packing, like=tokens, make=make)
    model: Any = trunk
    source, positions, before = (
        send(indices, tokens.device)
        for indices in (packing.source, packing.positions, packing.before)
    )
    row = tokens.flatten()[source][None]
    with attending(model, attention):
        states: Tensor = model(
            input_ids=row,
            position_ids=positions[None],
            attention_mask=torch.ones_like(row),  # else models guess padding by token ids
            use_cache=False,
        ).last_hidden_state
    return states.squeeze(0)[before]


def shares_prompts(model: nn.Module, longest: int) -> Support:
    """Whether log-probs of this language model, or states of this trunk, are computed packed.

    For sequences of at most ``longest`` tokens.
    """
    if not isinstance(model, PreTrainedModel):
        return Support("it is no model of transformers")
    if model.get_output_embeddings() is not None:
        few = torch.arange(min(8, longest), device=model.device)[None]
        verdict = logits_are_head_of_states(model, few % model.config.get_text_config().vocab_size)
        if not verdict:
            return verdict
    trunk: Any = model.get_decoder()
    return packs(trunk, longest)


def kernel_for(trunk: nn.Module, batch: Batch) -> Make | None:
    """The kernel with which this trunk computes the batch packed; None: it cannot."""
    model: Any = trunk  # a trunk that packs is a model with a device
    return _KERNELS[model.device.type] if packs(trunk, batch.tokens.shape[1]) else None


def packs(trunk: Any, longest: int) -> Support:
    """Whether this trunk computes sequences of at most ``longest`` tokens packed."""
    if not isinstance(trunk, PreTrainedModel):
        return Support("it is no model of transformers")
    if _computes_layers_again(trunk):
        return Support("its activations are checkpointed, outside of our attention")
    config: Any = trunk.config.get_text_config(decoder=True)
    for name in ("sliding_window", "attention_chunk_size"):
        limit = getattr(config, name, None)
        if limit is not None and limit < longest:
            return Support(f"its {name} of {limit} is shorter than sequences of {longest} tokens")
    make = _KERNELS.get(trunk.device.type)
    if make is None:
        return Support(f"there is no kernel for a device of the kind {trunk.device.type!r}")
    suits = _suits_flash(trunk, config) if make is Flash else Support()
    return suits and can_be_packed(trunk)


def _computes_layers_again(trunk: nn.Module) -> bool:
    """The property ``is_gradient_checkpointing``, which takes milliseconds, without its search."""
    layers = (layer for child in trunk.children() for layer in child.children())
    return any(getattr(module, "gradient_checkpointing", False) for module in (trunk, *layers))


def _suits_flash(trunk: PreTrainedModel, config: Any) -> Support:
    """Whether FlashAttention takes it: half precision, and heads of a size that it has."""
    if not torch.backends.cuda.is_flash_attention_available():
        return Support("PyTorch has no flash attention here")
    if torch.cuda.get_device_capability(trunk.device) < (8, 0):
        return Support("this GPU is too old for flash attention (its capability is below 8.0)")
    autocast = torch.is_autocast_enabled("cuda")
    compute = torch.get_autocast_dtype("cuda") if autocast else trunk.dtype
    if getattr(config, "v_head_dim", None):  # compressed keys: values of another size
        return Support("its values are of another size than its keys")
    if compute not in head.HALF:
        return Support(f"flash attention does not compute in {compute}")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size % 8 == 0 and size <= 256:
        return Support()
    return Support(f"flash attention has no heads of size {size}")


@remembered(_VERDICT)
def can_be_packed(trunk: PreTrainedModel) -> Support:
    """Whether this trunk gives the same hidden states for a packed batch.

    Compared on a few tokens: a model may carry more from token to token than attention (a
    convolution, a recurrence), and that would run across sequences.
    """
    with full_precision(trunk.device):
        return replaceable(trunk) and _compare(trunk)


def _compare(trunk: PreTrainedModel) -> Support:
    config = trunk.config.get_text_config()
    length = min(12, getattr(config, "max_position_embeddings", None) or 12)
    if length < 4:
        return Support(f"its context is {length} tokens")
    tokens = torch.arange(3 * length, device=trunk.device).reshape(3, -1) * 7 % config.vocab_size
    prompt = length // 2 - 1
    tokens[1, :prompt] = tokens[0, :prompt]
    mask = torch.zeros(tokens.shape, dtype=torch.bool, device=trunk.device)
    mask[:2, prompt:] = True
    mask[2, 1:] = True  # what crosses sequences shows in their first tokens
    batch = Batch(tokens=tokens, mask=mask)
    packing = pack(batch, spans(batch))
    others = tokens.clone()
    others[:2] = (tokens[:2] + 1) % config.vocab_size
    expected = ops.shift(trunk_states(trunk, tokens))[mask]
    try:
        found, beside = (packed_states(trunk, row, packing=packing) for row in (tokens, others))
    except NotImplementedError:
        return Support(f"a layer's window is shorter than {length} tokens")
    # What crosses sequences changes the first tokens of the next one by about 1. Other faults (a
    # model that counts positions itself) change most tokens, and rounding in half precision may
    # change a few as much: so the median decides.
    last = slice(-int(mask[2].sum()), None)
    apart = relative_errors(beside[last], found[last]) < 0.01
    same = relative_errors(found, expected).median() < max(0.01, 64 * torch.finfo(found.dtype).eps)
    if not bool(apart.all()):
        return Support("more than attention goes from token to token, and would cross sequences")
    return Support("" if same else "its positions are not those it is given")
