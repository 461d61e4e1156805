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
from posttrain.fast.kv_slots import Capacity, Continuing, Decoding, DecodingAlone, Reading, Slots
from posttrain.fast.scheduler import ScheduledSequence, Scheduler, prefill_parts, rows_for
from posttrain.models import head
from posttrain.models.adapter_group import choice_of, owners
from posttrain.models.gpu_memory import capture_lock
from posttrain.models.stops import Decode, cut_at_stop, may_have_stopped, tail_length
from posttrain.types import Sampling

Randomness = Callable[[Sequence[int]], Tensor]  # uniform numbers [n, new tokens] of sequences

LOOK_EVERY = 16  # steps between two looks at which sequences have ended
SHRINK_AT = 0.75  # on a CPU, the share of running rows at which the gaps are closed
REFILL_AT = 0.125  # share of the slots that must be free before prompts are read for them
PREFILL_TOKENS = 16384  # tokens of prompts in one pass, padding counted
BLOCK = 16  # rows of each pass on a CPU where no row may depend on how many others there are


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Ended sequences: their numbers, tokens and log-probs [n, new tokens], and how many count."""

    numbers: list[int]
    tokens: Tensor
    logprobs: Tensor
    lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The tokens of a slot that are new to the cache, which has ``cached`` of its own tokens."""

    slot: int
    cached: int
    tokens: tuple[int, ...]


class SlotDecoder:
    """Decodes any number of sequences, ``capacity.num_slots`` at a time.

    ``model`` computes as the engine wants it (its weights may change between two calls, its
    addresses may not). The state of a slot: the token to read next, how many tokens it has, how
    many it may have, the column at which its turn begins, whether it has ended, and what was drawn.
    """

    def __init__(
        self, model: Any, capacity: Capacity, *, end_tokens: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.dtype = dtype
        self._slots = Slots(model, capacity, dtype=dtype)
        device, count = model.device, capacity.num_slots
        self._end_tokens = torch.tensor(end_tokens, dtype=torch.long, device=device)
        self._token = torch.zeros(count, dtype=torch.long, device=device)
        self._begin = torch.zeros(count, dtype=torch.int32, device=device)
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
        self._choice = choice_of(model)  # of a model with several adapters
        self._adapter = torch.zeros(count, dtype=torch.long, device=device)

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
            ended = scheduler.release(self.look(scheduler, sampling.stop, decode=decode))
            drawn = self.collect(ended, sampling.max_new_tokens) if ended else None
        if drawn is not None:
            yield drawn

    def look(self, scheduler: Scheduler, stop: Sequence[str], *, decode: Decode) -> list[bool]:
        """Which slots have ended, also by a stop string in what was drawn since the last look."""
        if stop and scheduler.running:
            self._end_stopped(list(scheduler.running), stop, decode=decode)
        ended: list[bool] = self._ended.tolist()
        return ended

    def _end_stopped(self, running: Sequence[int], stop: Sequence[str], *, decode: Decode) -> None:
        slots = torch.tensor(running, device=self._token.device)
        begin = self._begin[slots].long()
        lengths = self._slots.written[slots] + 1 - begin
        back = torch.arange(-tail_length(stop, new=LOOK_EVERY), 0, device=slots.device)
        indices = ((begin + lengths)[:, None] + back).clamp_min(0)
        tails = self._tokens[slots[:, None], indices].tolist()
        columns = zip(running, begin.tolist(), lengths.tolist(), tails, strict=True)
        for slot, first, length, tail in columns:
            if may_have_stopped(tail[-length:], decode, stop=stop):
                whole = self._tokens[slot, first : first + length].tolist()
                self._ended[slot] |= cut_at_stop(whole, decode, stop=stop) is not None

    def collect(self, ended: Sequence[ScheduledSequence], new_tokens: int) -> Drawn:
        """What these sequences have drawn in the turn that has ended, of at most so many tokens."""
        slots = torch.tensor([sequence.slot for sequence in ended], device=self._token.device)
        begin = self._begin[slots].long()
        columns = begin[:, None] + torch.arange(new_tokens, device=slots.device)
        return Drawn(
            numbers=[sequence.number for sequence in ended],
            tokens=self._tokens[slots[:, None], columns].cpu(),
            logprobs=self._logprobs[slots[:, None], columns].cpu(),
            lengths=(self._slots.written[slots] + 1 - begin).tolist(),
        )

    # ------------------------------------------------------------------ reading

    def _admit(self, scheduler: Scheduler, sampling: Sampling, *, randomness: Randomness) -> None:
        """Fill the free slots: read the prompts that are new, and draw each first token."""
        sequences = scheduler.admit(sampling.max_new_tokens)
        self.place(sequences)
        uniforms = randomness([sequence.number for sequence in sequences])
        self.begin([sequence.slot for sequence in sequences], uniforms, sampling=sampling)

    def place(self, sequences: Sequence[ScheduledSequence], *, alone: bool = False) -> None:
        """Read the prompts that are new, and have the slots continue theirs.

        With ``alone`` each is read in a pass of its own: what it says does not depend on others.
        """
        new = {sequence.index: sequence.prompt for sequence in sequences if sequence.first}
        for part in prefill_parts(new, 1 if alone else PREFILL_TOKENS):
            self._read(part)
        slots, indices, lengths = (
            torch.tensor(column, device=self._token.device)
            for column in zip(*((s.slot, s.index, len(s.prompt)) for s in sequences), strict=True)
        )
        if self._choice is not None:
            self._adapter[slots] = owners((s.prompt for s in sequences), device=slots.device)
        self._slots.prompt[slots] = indices.int()
        self._slots.prompt_length[slots] = lengths.int()
        self._grouping = None

    def begin(
        self, slots: Sequence[int], uniforms: Tensor, *, sampling: Sampling, alone: bool = False
    ) -> None:
        """Draw the first tokens of sequences of which only the prompt is read: [n], [n, tokens]."""
        rows = self._set_up(slots, [0] * len(slots), uniforms=uniforms, sampling=sampling)
        assert self._states is not None
        for part in rows.split(1 if alone else 512):
            states = self._states[self._slots.prompt[part].long()]
            self._draw(head.project(self.model, states), part, sampling=sampling)

    def extend(self, tails: Sequence[Tail], uniforms: Tensor, *, sampling: Sampling) -> None:
        """Read what is new of sequences that go on, in one pass, and draw their next tokens."""
        device = self._token.device
        width = max(len(tail.tokens) for tail in tails)
        padded = torch.tensor([[*t.tokens, *[0] * (width - len(t.tokens))] for t in tails])
        begin = [tail.cached + len(tail.tokens) for tail in tails]
        rows = self._set_up([t.slot for t in tails], begin, uniforms=uniforms, sampling=sampling)
        cached, lengths = (
            torch.tensor(column, device=device)
            for column in zip(*((t.cached, len(t.tokens)) for t in tails), strict=True)
        )
        with capture_lock:
            reading = Continuing(self._slots, rows, cached=cached, lengths=lengths)
            if self._choice is not None:
                self._choice.choose(self._adapter[rows], width)
            with attending(self.model, reading):
                states = self._trunk(padded.to(device), reading.positions)
        last = states[torch.arange(len(tails), device=device), lengths - 1]
        self._draw(head.project(self.model, last), rows, sampling=sampling)

    def _set_up(
        self, slots: Sequence[int], begin: Sequence[int], *, uniforms: Tensor, sampling: Sampling
    ) -> Tensor:
        """Let the next draw of these slots be the first of a turn that begins at this column."""
        rows, first = (torch.tensor(each, device=self._token.device) for each in (slots, begin))
        self._begin[rows] = first.int()
        self._slots.written[rows] = first.int() - 1  # the first draw makes it the newest token's
        self._limit[rows] = first.int() + sampling.max_new_tokens
        self._ended[rows] = False
        columns = first[:, None] + torch.arange(uniforms.shape[1], device=rows.device)
        self._uniforms[rows[:, None], columns] = uniforms.to(self._uniforms.device)
        return rows

    def grow(self, num_slots: int, new_tokens: int) -> None:
        """Have room for so many tokens in each of the first slots; what they hold is kept."""
        more = new_tokens - self.capacity.new_tokens
        self.capacity = dataclasses.replace(
            self.capacity, num_slots=num_slots, new_tokens=new_tokens
        )
        self._steps.clear()  # what was captured reads the addresses of before
        self._slots.grow(self.capacity)
        self._tokens, self._logprobs, self._uniforms = (
            torch.nn.functional.pad(drawn, (0, more))
            for drawn in (self._tokens, self._logprobs, self._uniforms)
        )

    def _read(self, prompts: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """One pass over (index, prompt), padded on the right: no real token sees the padding."""
        device = self._token.device
        width = max(len(tokens) for _, tokens in prompts)
        padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for _, tokens in prompts])
        indices = torch.tensor([index for index, _ in prompts], device=device)
        last = torch.tensor([len(tokens) - 1 for _, tokens in prompts], device=device)
        if self._choice is not None:
            self._choice.choose(owners((tokens for _, tokens in prompts), device=device), width)
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

    def advance_alone(self, scheduler: Scheduler, sampling: Sampling) -> None:
        """Steps of which no row depends on another: on a CPU, blocks of a fixed number of rows.

        A matrix product rounds by its number of rows, attention by its number of keys. On a GPU
        steps are those of :meth:`run`.
        """
        if self._pool is not None:
            self._advance(scheduler, sampling)
            return
        running = list(scheduler.running)
        for first in range(0, len(running), BLOCK):
            block = running[first : first + BLOCK]
            rows = torch.tensor(block + block[:1] * (BLOCK - len(block)))
            self._step(rows, sampling, alone=True)
        scheduler.advance(1)

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
        """A captured step of the next larger number of rows; the rows to spare are an idle slot.

        One that has ended: it draws nothing, and only its last token is read, in its place.
        """
        slots = list(scheduler.running)
        count = rows_for(len(slots), self.capacity.num_slots)
        idle = [*scheduler.free[:1], *(paused.slot for paused in scheduler.paused.values())]
        padded = slots + idle[:1] * (count - len(slots))
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
            for state in (self._token, self._begin, self._limit, self._ended, self._adapter):
                state[target] = state[source]
            for drawn in (self._tokens, self._logprobs, self._uniforms):
                drawn[target] = drawn[source]
            self._ended[source] = True
        count = 1 + max(scheduler.running)
        if moves or self._grouping is None or len(self._grouping.start) != count:
            slots = self._slots
            self._grouping = Grouping.of(slots.prompt[:count], slots.prompt_length[:count])
        return functools.partial(self._step, self._rows[:count], sampling, grouping=self._grouping)

    def _step(
        self,
        rows: Tensor,
        sampling: Sampling,
        *,
        grouping: Grouping | None = None,
        alone: bool = False,
    ) -> None:
        """Read the newest token of each row, draw the next. Nothing here waits for a GPU."""
        slots = self._slots
        positions = (slots.prompt_length[rows] + slots.written[rows]).long()
        attention = (
            DecodingAlone(slots, rows) if alone else Decoding(slots, rows, grouping=grouping)
        )
        if self._choice is not None:
            self._choice.choose(self._adapter[rows])
        with attending(self.model, attention):
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
