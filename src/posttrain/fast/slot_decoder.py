"""Continuous batching: sequences run in slots, and a slot is refilled once its sequence has ended.

All that a step reads and writes is at fixed addresses, so on a GPU a step is captured once for each
number of rows and then replayed: the host only looks, every few steps, which sequences have ended.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.fast.attention.grouped import Grouping
from posttrain.fast.attention.interface import attending
from posttrain.fast.graphs import CapturedStep, Pool, Step
from posttrain.fast.kernels import sample
from posttrain.fast.kv_slots import Capacity, Decoding, Reading, Slots
from posttrain.fast.scheduler import ScheduledSequence, Scheduler, prefill_parts, rows_for
from posttrain.models import head
from posttrain.models.gpu_memory import capture_lock
from posttrain.models.stops import Decode, cut_at_stop, may_have_stopped, tail_length
from posttrain.types import Sampling

Randomness = Callable[[Sequence[int]], Tensor]  # uniform numbers [n, new tokens] of sequences

LOOK_EVERY = 16  # steps between two looks at which sequences have ended
SHRINK_AT = 0.75  # on a CPU, the share of running rows at which the gaps are closed
REFILL_AT = 0.125  # share of the slots that must be free before prompts are read for them
PREFILL_TOKENS = 16384  # tokens of prompts in one pass, padding counted


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Ended sequences: their numbers, tokens and log-probs [n, new tokens], and how many count."""

    numbers: list[int]
    tokens: Tensor
    logprobs: Tensor
    lengths: list[int]


class SlotDecoder:
    """Decodes any number of sequences, ``capacity.num_slots`` at a time.

    ``model`` computes as the engine wants it (its weights may change between two calls, its
    addresses may not). The state of a slot: the token to read next, how many tokens it has, how
    many it may have, whether it has ended, and what was drawn.
    """

    def __init__(
        self, model: Any, capacity: Capacity, *, end_tokens: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.model = model
        self.capacity = capacity
        self._slots = Slots(model, capacity, dtype=dtype)
        device, count = model.device, capacity.num_slots
        self._end_tokens = torch.tensor(end_tokens, dtype=torch.long, device=device)
        self._token = torch.zeros(count, dtype=torch.long, device=device)
        self._limit = torch.zeros(count, dtype=torch.int32, device=device)
        self._ended = torch.ones(count, dtype=torch.bool, device=device)
        self._rows = torch.arange(count, device=device)
        self._tokens = torch.zeros(count, capacity.new_tokens, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(count, capacity.new_tokens, dtype=torch.float64, device=device)
        self._uniforms = torch.zeros(count, capacity.new_tokens, dtype=torch.float64, device=device)
        self._states: Tensor | None = None  # [P, D]: the last state of each prompt
        self._steps: dict[tuple[int, Sampling], Step] = {}
        self._grouping: Grouping | None = None
        self._pool = Pool() if device.type == "cuda" else None

    @property
    def not_captured(self) -> str:
        """Why its steps cannot be captured; empty where they can, or where there is no GPU."""
        return "" if self._pool is None else self._pool.broken

    def run(
        self,
        prompts: Mapping[int, tuple[int, ...]],
        sampling: Sampling,
        *,
        randomness: Randomness,
        decode: Decode,
    ) -> Iterator[Drawn]:
        """Sample what follows each prompt; the ended ones come out by their numbers, in no order.

        Tokens that are drawn after a stop string, before it is noticed, are among the result.
        """
        scheduler = Scheduler(prompts, self.capacity)
        drawn = None
        while scheduler.waiting or scheduler.running:
            if scheduler.waiting and len(scheduler.free) >= REFILL_AT * self.capacity.num_slots:
                self._admit(scheduler, sampling, randomness=randomness)
            else:
                self._advance(scheduler, sampling)
            if drawn is not None:  # the caller works on these while the GPU runs the steps
                yield drawn
            if sampling.stop:
                self._end_stopped(scheduler, sampling.stop, decode=decode)
            ended = scheduler.release(self._ended.tolist())
            drawn = self._collect(ended) if ended else None
        if drawn is not None:
            yield drawn

    def _end_stopped(self, scheduler: Scheduler, stop: Sequence[str], *, decode: Decode) -> None:
        """End the sequences whose text holds a stop string since the last look."""
        slots = torch.tensor(list(scheduler.running), device=self._token.device)
        lengths = (self._slots.written[slots] + 1).long()
        back = torch.arange(-tail_length(stop, new=LOOK_EVERY), 0, device=slots.device)
        indices = (lengths[:, None] + back).clamp_min(0)
        tails = self._tokens[slots[:, None], indices].tolist()
        for slot, length, tail in zip(slots.tolist(), lengths.tolist(), tails, strict=True):
            if may_have_stopped(tail[-length:], decode, stop=stop):
                whole = self._tokens[slot, :length].tolist()
                self._ended[slot] |= cut_at_stop(whole, decode, stop=stop) is not None

    def _collect(self, ended: Sequence[ScheduledSequence]) -> Drawn:
        slots = torch.tensor([sequence.slot for sequence in ended], device=self._token.device)
        lengths = self._slots.written[slots] + 1
        return Drawn(
            numbers=[sequence.number for sequence in ended],
            tokens=self._tokens[slots].cpu(),
            logprobs=self._logprobs[slots].cpu(),
            lengths=lengths.tolist(),
        )

    # ------------------------------------------------------------------ reading prompts

    def _admit(self, scheduler: Scheduler, sampling: Sampling, *, randomness: Randomness) -> None:
        """Fill the free slots: read the prompts that are new, and draw each first token."""
        sequences = scheduler.admit(sampling.max_new_tokens)
        new = {sequence.index: sequence.prompt for sequence in sequences if sequence.first}
        for part in prefill_parts(new, PREFILL_TOKENS):
            self._read(part)
        slots, indices, lengths = (
            torch.tensor(column, device=self._token.device)
            for column in zip(*((s.slot, s.index, len(s.prompt)) for s in sequences), strict=True)
        )
        uniforms = randomness([sequence.number for sequence in sequences])
        self._slots.prompt[slots] = indices.int()
        self._slots.prompt_length[slots] = lengths.int()
        self._slots.written[slots] = -1  # no token yet; the first draw makes it 0
        self._limit[slots] = sampling.max_new_tokens
        self._ended[slots] = False
        self._grouping = None
        self._uniforms[slots, : uniforms.shape[1]] = uniforms.to(self._uniforms.device)
        assert self._states is not None
        for part in slots.split(512):
            states = self._states[self._slots.prompt[part].long()]
            self._draw(head.project(self.model, states), part, sampling=sampling)

    def _read(self, prompts: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """One pass over (index, prompt), padded on the right: no real token sees the padding."""
        device = self._token.device
        width = max(len(tokens) for _, tokens in prompts)
        padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for _, tokens in prompts])
        indices = torch.tensor([index for index, _ in prompts], device=device)
        last = torch.tensor([len(tokens) - 1 for _, tokens in prompts], device=device)
        with capture_lock, attending(self.model, Reading(self._slots, indices)):
            states = self._trunk(padded.to(device), torch.arange(width, device=device)[None])
        found = states[torch.arange(len(prompts), device=device), last]
        if self._states is None:
            self._states = found.new_zeros(self.capacity.num_prompts, found.shape[1])
        self._states[indices] = found

    def _trunk(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self.model.get_decoder()(
            input_ids=tokens,
            position_ids=positions.expand(tokens.shape),
            attention_mask=None,
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state
        return states

    # ------------------------------------------------------------------ one step

    def _advance(self, scheduler: Scheduler, sampling: Sampling) -> None:
        """A few steps of the running slots."""
        steps = min(LOOK_EVERY, scheduler.most_left) if self._pool is not None else 1
        step = (
            self._captured(scheduler, sampling)
            if self._pool is not None
            else self._direct(scheduler, sampling)
        )
        for _ in range(steps):
            step()
        scheduler.advance(steps)

    def _captured(self, scheduler: Scheduler, sampling: Sampling) -> Step:
        """A captured step of the next larger number of rows; the rows to spare are a free slot."""
        slots = list(scheduler.running)
        count = rows_for(len(slots), self.capacity.num_slots)
        padded = slots + scheduler.free[:1] * (count - len(slots))
        self._rows[:count] = torch.tensor(padded, device=self._rows.device)
        # Neither the limit, which is in the slots, nor stop strings are part of a step.
        key = (count, dataclasses.replace(sampling, max_new_tokens=1, stop=()))
        if key not in self._steps:
            self._steps[key] = self._to_capture(self._rows[:count], sampling)
        return self._steps[key]

    def _to_capture(self, rows: Tensor, sampling: Sampling) -> CapturedStep:
        """A step of these rows; it holds the decoder weakly, because the decoder holds it."""
        assert self._pool is not None
        decoder = weakref.proxy(self)
        return CapturedStep(lambda: decoder._step(rows, sampling), self._pool)

    def _direct(self, scheduler: Scheduler, sampling: Sampling) -> Step:
        """A step of the first slots; where too many of them are free, the gaps are closed."""
        moves = scheduler.compact(SHRINK_AT)
        if moves:
            source, target = (torch.tensor(column) for column in zip(*moves, strict=True))
            self._slots.move(source, target)
            for state in (self._token, self._limit, self._ended):
                state[target] = state[source]
            for drawn in (self._tokens, self._logprobs, self._uniforms):
                drawn[target] = drawn[source]
            self._ended[source] = True
        count = 1 + max(scheduler.running)
        if moves or self._grouping is None or len(self._grouping.start) != count:
            slots = self._slots
            self._grouping = Grouping.of(slots.prompt[:count], slots.prompt_length[:count])
        return functools.partial(self._step, self._rows[:count], sampling, grouping=self._grouping)

    def _step(self, rows: Tensor, sampling: Sampling, *, grouping: Grouping | None = None) -> None:
        """Read the newest token of each row, draw the next. Nothing here waits for a GPU."""
        slots = self._slots
        positions = (slots.prompt_length[rows] + slots.written[rows]).long()
        with attending(self.model, Decoding(slots, rows, grouping=grouping)):
            states = self._trunk(self._token[rows][:, None], positions[:, None])
        self._draw(head.project(self.model, states[:, -1]), rows, sampling=sampling)

    def _draw(self, logits: Tensor, rows: Tensor, *, sampling: Sampling) -> None:
        """Draw and store a token for each row that has not ended: [n, V], [n]."""
        slots = self._slots
        at = (slots.written[rows] + 1).long()
        running = ~self._ended[rows]
        last = self._tokens.shape[1] - 1
        at = torch.where(running, at, at.clamp_max(last))
        tokens, logprobs = sample(logits, self._uniforms[rows, at], sampling=sampling)
        kept, old = self._tokens[rows, at], self._logprobs[rows, at]
        self._tokens[rows, at] = torch.where(running, tokens, kept)
        self._logprobs[rows, at] = torch.where(running, logprobs.to(old.dtype), old)
        self._token[rows] = torch.where(running, tokens, self._token[rows])
        slots.written[rows] += running.int()
        stop = (tokens[:, None] == self._end_tokens).any(1) | (at + 1 >= self._limit[rows])
        self._ended[rows] |= running & stop
