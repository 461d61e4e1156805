"""The door to sampling in slots: prompts in, sampled tokens and their log-probs out.

Sequences run in slots at fixed addresses, and on a GPU their steps are CUDA graphs that are
replayed. The plain twin, a growing cache and one batch after the other, is
:meth:`posttrain.rollout.engines.native.NativeEngine.decode_part`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from posttrain.fast import kernels
from posttrain.fast.attention.replaceable import replaceable
from posttrain.fast.cast_copy import CastCopy, frozen_bytes
from posttrain.fast.compiled import ask_once, compilable, compile_layers, is_compiled, uncompiled
from posttrain.fast.kernels import sample
from posttrain.fast.kv_slots import Capacity, bytes_per_slot, fits_slots, width_for
from posttrain.fast.linear_products import quicken_linears
from posttrain.fast.slot_decoder import PREFILL_TOKENS, Drawn, Randomness, SlotDecoder
from posttrain.fast.slot_turns import SlotTurns, TurnRandomness
from posttrain.models import head
from posttrain.models.gpu_memory import free_bytes, memory_budget
from posttrain.models.stops import Decode
from posttrain.types import Sampling
from posttrain.types.ways import Support, Way

__all__ = [
    "PREFILL_TOKENS",
    "CastCopy",
    "Decoder",
    "Drawn",
    "capacity_for",
    "fuses_frozen",
    "most_slots",
    "sample",
    "uncompiled",
]
FUSED_SHARE = 0.25  # of the free memory, for a second copy of a frozen base


class Decoder:
    """Samples with one model, and keeps slots, CUDA graphs and cast weights between calls.

    ``compute`` is the type of the arithmetic (None: that of the weights). ``compiled`` has the
    layers compiled before their steps are captured. At most ``max_sequences`` are decoded at once;
    None: as many as fit into half of the free memory.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_tokens: Sequence[int],
        compute: torch.dtype | None = None,
        compiled: bool = False,
        max_sequences: int | None = None,
    ) -> None:
        quicken_linears(model)
        self.model = model
        self.slots: SlotDecoder | None = None
        self._end_tokens = end_tokens
        self._compute = compute
        self._compiled = compiled
        self._max_sequences = max_sequences
        self._copy: CastCopy | None = None
        self._most = 1  # how many slots fitted into memory when they were made

    def takes_model(self) -> Support:
        """Whether the model has attention, keys and a head that slots can take over."""
        probe = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        return (
            replaceable(self.model)
            and fits_slots(self.model)
            and head.logits_are_head_of_states(self.model, probe)
        )

    def way(self) -> Way:
        """Continuous batching in slots; on a GPU their steps are replayed from CUDA graphs."""
        wanted = []
        if self.model.device.type == "cuda":
            broken = "" if self.slots is None else self.slots.not_captured
            exact = (self._compute or self.model.dtype) == torch.float64
            triton = "they do not compute in float64" if exact else ""
            triton = triton if kernels.has_triton() else "Triton is not installed"
            wanted = [
                ("CUDA graphs", Support(broken), "each step takes longer"),
                ("Triton kernels", Support(triton), "plain PyTorch attends and draws"),
            ]
        if self._compiled:
            wanted.append(("compiled layers", compilable(self.model), "they run as written"))
        return Way.of("continuous batching", wanted=wanted)

    def decode(
        self,
        prompts: Mapping[int, tuple[int, ...]],
        sampling: Sampling,
        *,
        randomness: Randomness,
        decode: Decode,
    ) -> Iterator[Drawn]:
        """Sample what follows each prompt, by the number of the sequence, in this order.

        ``randomness`` gives the uniform numbers of sequences; ``decode`` the text in which stop
        strings are looked for. Sequences come out as they end. After an error, call
        :meth:`forget`: the cache may hold NaN.
        """
        slots = self._slots_for(prompts.values(), new_tokens=sampling.max_new_tokens)
        yield from slots.run(_in_order(prompts), sampling, randomness=randomness, decode=decode)

    def turns(
        self,
        prompts: Mapping[int, tuple[int, ...]],
        sampling: Sampling,
        *,
        randomness: TurnRandomness,
        decode: Decode,
    ) -> SlotTurns:
        """Sample turn after turn behind each prompt, by the number of the sequence.

        At first there is room for two turns, and then for as many as the longest has needed.
        """
        tokens = width_for(2 * sampling.max_new_tokens)
        slots = self._slots_for(prompts.values(), new_tokens=tokens, widened=True)
        order = _in_order(prompts)
        return SlotTurns(slots, order, sampling=sampling, randomness=randomness, decode=decode)

    def forget(self) -> None:
        """Free the slots and their cache."""
        self.slots = None

    def close(self) -> None:
        """Free the slots, and the copy of the weights."""
        self.slots = self._copy = None

    def _slots_for(
        self, prompts: Collection[tuple[int, ...]], *, new_tokens: int, widened: bool = False
    ) -> SlotDecoder:
        """The slots of the last call if this one fits into them, else new ones."""
        model = self._model_to_sample()
        longest = max(map(len, prompts))
        size = {"longest": width_for(longest) if widened else longest, "new_tokens": new_tokens}
        counts = {"sequences": len(prompts), "distinct": len(set(prompts)), **size}
        if self.slots is not None:
            if self.slots.capacity.holds(capacity_for(most=self._most, **counts)):
                return self.slots
            self.slots = None  # free their memory before the new ones are made
        dtype = self._compute or model.dtype
        budget = memory_budget(model.device)
        self._most = self._max_sequences or most_slots(
            model, longest + new_tokens, dtype=dtype, budget=budget
        )
        capacity = capacity_for(most=self._most, **counts)
        self.slots = SlotDecoder(model, capacity, end_tokens=self._end_tokens, dtype=dtype)
        return self.slots

    def _model_to_sample(self) -> Any:
        """The model, or a copy with its current weights in half precision; compiled if wanted."""
        if self._copy is not None:
            self._copy.refresh()
        elif self._compute in head.HALF and self.model.dtype not in head.HALF:
            if self._compiled:
                ask_once(self.model)  # a copy with weights of two types could not be asked
            device = self.model.device
            free = free_bytes(device) if device.type == "cuda" else None
            fuse = fuses_frozen(self.model, self._compute, free=free)
            self._copy = CastCopy(self.model, self._compute, fuse_frozen=fuse)
        model = self.model if self._copy is None else self._copy.model
        if self._compiled and not is_compiled(model):
            compile_layers(model)
        return model


def _in_order(prompts: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Short ones first, and equal ones together, so that each prompt is read once."""
    first: dict[tuple[int, ...], int] = {}
    for number, prompt in prompts.items():
        first.setdefault(prompt, number)
    return dict(sorted(prompts.items(), key=lambda item: (len(item[1]), first[item[1]])))


def fuses_frozen(model: Any, compute: torch.dtype, *, free: float | None) -> bool:
    """Whether there is room to copy the frozen base of adapters: fused, it is read faster."""
    return free is None or frozen_bytes(model, compute) <= FUSED_SHARE * free


def most_slots(model: Any, tokens: int, *, dtype: torch.dtype, budget: float) -> int:
    """How many sequences of so many tokens are decoded at once in so many bytes."""
    return max(1, int(budget // bytes_per_slot(model, tokens, dtype=dtype)))


def capacity_for(
    *, sequences: int, distinct: int, longest: int, new_tokens: int, most: int
) -> Capacity:
    """A slot for every sequence, or as many as there may be; ``distinct`` prompts are read once."""
    slots = min(sequences, most)
    return Capacity(
        num_prompts=min(distinct, slots + 1),
        prompt_tokens=-(-longest // 16) * 16,
        num_slots=slots,
        new_tokens=new_tokens,
    )
