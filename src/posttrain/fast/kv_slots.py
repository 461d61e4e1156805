"""The KV cache of many sequences at fixed addresses: a prompt once, each completion in a slot.

The keys and values of a prompt are kept once, however many completions continue it; those of each
completion are in a slot of their own. Nothing moves while sequences come and go, so that the step
that reads them can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.fast import kernels
from posttrain.fast.attention.grouped import GroupedStep, Grouping
from posttrain.fast.attention.interface import Causal, attending, for_all_heads
from posttrain.models.cache import KeyShape
from posttrain.models.sampling import at_least_float32
from posttrain.types.ways import Support, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERDICT = "_posttrain_keys_fit_slots"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Prompts and tokens of the longest, slots and tokens of the longest completion."""

    num_prompts: int
    prompt_tokens: int
    num_slots: int
    new_tokens: int

    def num_bytes(self, model: PreTrainedModel, dtype: torch.dtype) -> int:
        """Keys and values of all prompts and slots, and 24 bytes for each token that is drawn."""
        drawn = self.num_slots * self.new_tokens
        tokens = self.num_prompts * self.prompt_tokens + drawn
        return tokens * KeyShape.of(model).bytes_per_token(dtype) + 24 * drawn

    def holds(self, other: Capacity) -> bool:
        """Whether this is at least as large in every respect."""
        return all(getattr(self, name) >= size for name, size in vars(other).items())


class Slots:
    """Keys and values of all layers, and which prompt each slot continues.

    Shapes, for each layer: prompts ``[P, K, prompt, D]``, completions ``[S, K, new, D]``. A slot's
    sequence is the first ``prompt_length`` tokens of its prompt and ``written`` tokens of its own.
    """

    def __init__(self, model: PreTrainedModel, capacity: Capacity, *, dtype: torch.dtype) -> None:
        shape = KeyShape.of(model)
        self.capacity = capacity
        self.device = model.device
        kind = {"dtype": dtype, "device": model.device}
        sizes = [
            (capacity.num_prompts, capacity.prompt_tokens),
            (capacity.num_slots, capacity.new_tokens),
        ]
        self.prompt_keys, self.prompt_values, self.keys, self.values = (
            [
                torch.zeros(rows, shape.heads, tokens, shape.size, **kind)
                for _ in range(shape.layers)
            ]
            for rows, tokens in sizes
            for _ in range(2)
        )
        count = {"dtype": torch.int32, "device": model.device}
        self.prompt = torch.zeros(capacity.num_slots, **count)
        self.prompt_length = torch.zeros(capacity.num_slots, **count)
        self.written = torch.zeros(capacity.num_slots, **count)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots ``source`` to the slots ``target``; no slot may be in both."""
        used = int(self.written[source].max()) + 1
        for states in (*self.keys, *self.values):
            states[target, :, :used] = states[source, :, :used]
        for state in (self.prompt, self.prompt_length, self.written):
            state[target] = state[source]

    def grow(self, capacity: Capacity) -> None:
        """Have the slots of this capacity, with what was in them; layer by layer, to spare memory.

        The addresses of keys and values change.
        """
        more = capacity.new_tokens - self.capacity.new_tokens
        self.capacity = capacity
        for layers in (self.keys, self.values):
            for layer, states in enumerate(layers):
                kept = states[: capacity.num_slots]
                layers[layer] = torch.nn.functional.pad(kept, (0, 0, 0, more))


@remembered(_VERDICT)
@torch.no_grad()
def fits_slots(model: Any) -> Support:
    """Whether the keys and values of all layers have the one shape that slots have.

    Seen in a pass: some models compress their keys, or have heads of another size in some layers.
    """
    try:
        expected = KeyShape.of(model)
    except (AttributeError, RuntimeError, TypeError):  # layers with a configuration each
        return Support("its layers have keys of more than one shape")
    seen = _Shapes()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with attending(model, seen):
        model.get_decoder()(input_ids=token, position_ids=token, use_cache=False)
    if seen.found == {(expected.heads, expected.size)}:
        return Support()
    shapes = " and ".join(f"{heads} heads of {size}" for heads, size in sorted(seen.found))
    said = f"{expected.heads} heads of {expected.size}"
    return Support(f"its keys and values are {shapes}, where its configuration says {said}")


class _Shapes(Causal):
    """Attention that notes how many key heads there are, and of which size."""

    def __init__(self) -> None:
        self.found: set[tuple[int, int]] = set()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Causal attention."""
        self.found |= {(states.shape[1], states.shape[3]) for states in (key, value)}
        return super().attend(query, key, value, **options)


def bytes_per_slot(model: PreTrainedModel, tokens: int, *, dtype: torch.dtype) -> int:
    """Memory of a sequence of so many tokens: keys and values, what is drawn, and its logits."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return tokens * (KeyShape.of(model).bytes_per_token(dtype) + 24) + 16 * vocabulary


class Reading(Causal):
    """Attention of prompts, one a row, padded on the right; it keeps their keys and values."""

    def __init__(self, slots: Slots, rows: Tensor) -> None:
        self._slots = slots
        self._rows = rows

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention; the padding is kept too, and never read."""
        length = key.shape[2]
        dtype = self._slots.prompt_keys[layer].dtype
        self._slots.prompt_keys[layer][self._rows, :, :length] = key.to(dtype)
        self._slots.prompt_values[layer][self._rows, :, :length] = value.to(dtype)
        return super().attend(query, key, value, layer=layer, scale=scale, window=window)


class Decoding:
    """Attention of the newest token of each slot in ``rows``; its key and value are written first.

    With a ``grouping`` the rows are the first slots, on a CPU.
    """

    def __init__(self, slots: Slots, rows: Tensor, *, grouping: Grouping | None = None) -> None:
        self._slots = slots
        self._rows = rows
        self._step = None
        if grouping is not None:
            self._step = GroupedStep(grouping, slots.written[: len(rows)])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Shapes: [n, H, 1, D], [n, K, 1, D] × 2 → [n, 1, H, D]."""
        slots = self._slots
        newest = [states.squeeze(2) for states in (query, key, value)]
        prompt = slots.prompt_keys[layer], slots.prompt_values[layer]
        completion = slots.keys[layer], slots.values[layer]
        if self._step is not None:
            newest = [states.to(completion[0].dtype) for states in newest]
            with torch.autocast(query.device.type, enabled=False):
                mixed = self._step.attend(
                    *newest, prompt=prompt, completion=completion, scale=scale, window=window or 0
                )
            return mixed[:, None]
        mixed = _form_for(completion[0])(
            *newest,
            prompt_keys=prompt[0],
            prompt_values=prompt[1],
            keys=completion[0],
            values=completion[1],
            rows=self._rows,
            prompt=slots.prompt,
            prompt_length=slots.prompt_length,
            written=slots.written,
            scale=scale,
            window=window or 0,
        )
        return mixed[:, None]


class DecodingAlone:
    """As :class:`Decoding` on a CPU, computed for each row as if there were no others.

    Sums round by how many keys there are. So a row sees as many, those that are masked counted, as
    its own length says: rows of one width go together, each a matrix product of its own.
    """

    def __init__(self, slots: Slots, rows: Tensor) -> None:
        self._slots = slots
        lengths = zip(slots.prompt_length[rows].tolist(), slots.written[rows].tolist(), strict=True)
        blocks: dict[tuple[int, int], list[int]] = {}
        for row, (prompt, written) in enumerate(lengths):
            blocks.setdefault((width_for(prompt), width_for(written + 1)), []).append(row)
        self._blocks = {
            widths: (torch.tensor(block), rows[block]) for widths, block in blocks.items()
        }

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Shapes: [n, H, 1, D], [n, K, 1, D] × 2 → [n, 1, H, D]."""
        slots = self._slots
        newest = [states.squeeze(2) for states in (query, key, value)]
        mixed = newest[0].new_empty(newest[0].shape, dtype=slots.keys[layer].dtype)
        for (prompt, own), (block, rows) in self._blocks.items():
            mixed[block] = plain_decode_attention(
                *(states[block] for states in newest),
                prompt_keys=slots.prompt_keys[layer][:, :, :prompt],
                prompt_values=slots.prompt_values[layer][:, :, :prompt],
                keys=slots.keys[layer][:, :, :own],
                values=slots.values[layer][:, :, :own],
                rows=rows,
                prompt=slots.prompt,
                prompt_length=slots.prompt_length,
                written=slots.written,
                scale=scale,
                window=window or 0,
            )
        return mixed[:, None]


def width_for(length: int) -> int:
    """Columns for so many tokens: powers of two, and half of the way between.

    >>> [width_for(length) for length in (1, 33, 49, 65, 97)]
    [32, 48, 64, 96, 128]
    """
    width = 32
    while width < length:
        width = width // 2 * 3 if width & (width - 1) == 0 else width // 3 * 4
    return width


class Continuing:
    """Attention of new tokens of slots, padded on the right, to themselves and all before them.

    The slots have ``cached`` tokens of their own, and get ``lengths`` more, whose keys and values
    are written behind them. Shapes: rows, cached and lengths [n].
    """

    def __init__(self, slots: Slots, rows: Tensor, *, cached: Tensor, lengths: Tensor) -> None:
        self._slots, self._rows = slots, rows
        start = slots.prompt_length[rows].long()[:, None]
        new = torch.arange(int(lengths.max()), device=rows.device)
        asked = torch.arange(int(start.max()), device=rows.device)
        answered = torch.arange(int((cached + lengths).max()), device=rows.device)
        columns = cached[:, None] + new
        self.positions = start + columns
        real = new < lengths[:, None]
        self._new = real.nonzero(as_tuple=True)
        self._columns = columns[real]
        position = torch.cat([asked.expand(len(rows), -1), start + answered], 1)
        self._ago = self.positions[:, :, None] - position[:, None]  # [n, new, prompt + own]
        there = torch.cat([asked < start, (answered >= 0).expand(len(rows), -1)], 1)
        self._seen = there[:, None] & (self._ago >= 0)
        self._widths = len(asked), len(answered)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Shapes: [n, H, T, D], [n, K, T, D] × 2 → [n, T, H, D]."""
        slots = self._slots
        own, new = (slots.keys[layer], slots.values[layer]), (key, value)
        prompts = slots.prompt_keys[layer], slots.prompt_values[layer]
        row, when = self._new
        asked, answered = self._widths
        every = []
        for prompt, kept, states in zip(prompts, own, new, strict=True):
            written = states.transpose(1, 2)[row, when].to(kept.dtype)
            kept[self._rows[row], :, self._columns] = written
            before = prompt[slots.prompt[self._rows].long(), :, :asked]
            whole = torch.cat([before, kept[self._rows, :, :answered]], 2)
            every.append(for_all_heads(whole, query))
        seen = self._seen if window is None else self._seen & (self._ago < window)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query.to(every[0].dtype), every[0], every[1], attn_mask=seen[:, None], scale=scale
        )
        return mixed.transpose(1, 2)


def _form_for(keys: Tensor) -> Callable[..., Tensor]:
    """A kernel of our own on a GPU, else plain PyTorch."""
    if kernels.takes(keys):
        from posttrain.fast.kernels.decode_attention import decode_attention

        return decode_attention
    return plain_decode_attention


def plain_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    prompt: Tensor,
    prompt_length: Tensor,
    written: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Write key and value of the newest tokens, and attend to them and all before them.

    ``window`` is how many tokens they see, themselves included; 0: all. It is computed in the type
    of the keys that are kept. Shapes: query [n, H, D], key and value [n, K, D], rows [n] →
    [n, H, D].
    """
    query, key, value = (states.to(keys.dtype) for states in (query, key, value))
    own, start = written[rows].long(), prompt_length[rows].long()
    keys[rows, :, own] = key
    values[rows, :, own] = value
    pairs = ((prompt_keys[prompt[rows]], keys[rows]), (prompt_values[prompt[rows]], values[rows]))
    groups = query.shape[1] // key.shape[1]
    every_key, every_value = (torch.cat(p, 2).repeat_interleave(groups, 1) for p in pairs)
    asked = torch.arange(prompt_keys.shape[2], device=query.device)
    answered = torch.arange(keys.shape[2], device=query.device)
    # The position of each key in its sequence, which ends at the newest token.
    position = torch.cat([asked.expand(len(rows), -1), start[:, None] + answered], 1)
    real = torch.cat([asked < start[:, None], answered <= own[:, None]], 1)
    if window:
        real &= position > (start + own)[:, None] - window
    scores = at_least_float32((every_key @ query[..., None]).squeeze(-1)) * scale
    shares = scores.masked_fill(~real[:, None], -torch.inf).softmax(-1).to(value.dtype)
    return (shares[:, :, None] @ every_value).squeeze(2)
