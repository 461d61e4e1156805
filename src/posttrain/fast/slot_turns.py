"""Several turns in slots: a sequence whose reply has come goes on with the cache it has.

A sequence between two turns keeps its slot. Where others wait for a slot and it waits for its
reply, the slot is theirs, and it is read again when it goes on: it draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from posttrain.fast import slot_decoder
from posttrain.fast.kv_slots import width_for
from posttrain.fast.scheduler import ScheduledSequence, Scheduler, prefill_parts
from posttrain.fast.slot_decoder import Drawn, SlotDecoder, Tail
from posttrain.models.cache import KeyShape
from posttrain.models.gpu_memory import memory_budget
from posttrain.models.stops import Decode
from posttrain.types import Sampling

# Uniform numbers [n, new tokens] of sequences, for the turns of these numbers.
TurnRandomness = Callable[[Sequence[int], Sequence[int]], Tensor]


class SlotTurns:
    """Samples turn after turn: :meth:`step` gives turns that have ended, others go on meanwhile.

    After each step, say of every sequence whose reply is known whether it goes on or is over, and
    then :meth:`make_room`. On a CPU, what a sequence draws and how likely it was does not depend,
    to the bit, on when replies come: nothing is read or stepped in a shape that others decide.
    """

    def __init__(
        self,
        decoder: SlotDecoder,
        prompts: Mapping[int, tuple[int, ...]],
        *,
        sampling: Sampling,
        randomness: TurnRandomness,
        decode: Decode,
    ) -> None:
        self._decoder, self._prompts, self._sampling = decoder, prompts, sampling
        self._randomness, self._decode = randomness, decode
        self._scheduler = Scheduler(prompts, decoder.capacity)
        self._alone = decoder.model.device.type == "cpu"
        self._own: dict[int, tuple[int, ...]] = dict.fromkeys(prompts, ())  # behind the prompt
        self._turn = dict.fromkeys(prompts, 0)
        self._unread: dict[int, int] = {}  # of paused sequences whose reply has come

    @property
    def _scarce(self) -> bool:
        """Whether there are fewer slots than sequences."""
        return len(self._prompts) > self._decoder.capacity.num_slots

    @property
    def idle(self) -> bool:
        """Whether nothing can be sampled before a reply comes."""
        scheduler = self._scheduler
        return not (scheduler.running or scheduler.waiting or self._unread)

    def step(self) -> Drawn | None:
        """Read what has come, or take a few steps; the turns that have ended, if any."""
        scheduler, sampling = self._scheduler, self._sampling
        enough = slot_decoder.REFILL_AT * self._decoder.capacity.num_slots
        if self._unread:
            self._resume()
        elif scheduler.waiting and (len(scheduler.free) >= enough or not scheduler.running):
            self._admit()
        else:
            self._decoder.advance_alone(scheduler, sampling)
        ended = self._decoder.look(scheduler, sampling.stop, decode=self._decode)
        paused = scheduler.pause(ended)
        return self._decoder.collect(paused, sampling.max_new_tokens) if paused else None

    def go_on(self, number: int, own: tuple[int, ...], *, unread: int) -> None:
        """Give a sequence another turn behind its ``own`` tokens; the last ``unread`` are new."""
        self._own[number] = own
        self._turn[number] += 1
        if len(own) + self._sampling.max_new_tokens > self._decoder.capacity.new_tokens:
            self._grow(len(own) + self._sampling.max_new_tokens)
        paused = number in self._scheduler.paused
        if paused and self._alone and self._scarce:  # as if its reply had been waited for
            self._scheduler.drop(number)
            paused = False
        if paused:
            self._unread[number] = unread
        else:
            self._scheduler.waiting.appendleft((number, self._prompts[number]))

    def end(self, number: int) -> None:
        """Say that a sequence is over."""
        if number in self._scheduler.paused:
            self._scheduler.drop(number)
        self._scheduler.finish(self._prompts[number])

    def make_room(self) -> None:
        """Give the slots of sequences that wait for their replies to those that wait for a slot.

        On a CPU to those that may: whether one is read again must not depend on when replies come.
        """
        scheduler = self._scheduler
        pending = [number for number in scheduler.paused if number not in self._unread]
        short = len(scheduler.waiting) - len(scheduler.free)
        if self._alone:
            short = len(pending) if self._scarce else 0
        for number in pending[: max(0, short)]:
            scheduler.drop(number)

    def _admit(self) -> None:
        """Fill the free slots: read the prompts that are new, and all that was said since."""
        sequences = self._scheduler.admit(self._sampling.max_new_tokens)
        if not sequences:
            return
        self._decoder.place(sequences, alone=self._alone)
        new = [sequence for sequence in sequences if not self._own[sequence.number]]
        if new:
            slots, numbers = zip(*((s.slot, s.number) for s in new), strict=True)
            uniforms = self._uniforms(numbers)
            self._decoder.begin(slots, uniforms, sampling=self._sampling, alone=self._alone)
        self._extend({s: 0 for s in sequences if self._own[s.number]})

    def _resume(self) -> None:
        """Read what is new of the sequences that go on in their slots."""
        cached = {}
        for number, unread in self._unread.items():
            sequence = self._scheduler.resume(number, self._sampling.max_new_tokens)
            cached[sequence] = len(self._own[number]) - unread
        self._unread.clear()
        self._extend(cached)

    def _extend(self, cached: Mapping[ScheduledSequence, int]) -> None:
        """Read the tokens of sequences behind those in the cache, in passes that fit."""
        sequences = list(cached)
        wholes = {n: (*s.prompt, *self._own[s.number]) for n, s in enumerate(sequences)}
        for part in prefill_parts(wholes, 1 if self._alone else slot_decoder.PREFILL_TOKENS):
            some = [sequences[n] for n, _ in part]
            tails = [
                Tail(slot=s.slot, cached=cached[s], tokens=self._own[s.number][cached[s] :])
                for s in some
            ]
            uniforms = self._uniforms([s.number for s in some])
            self._decoder.extend(tails, uniforms, sampling=self._sampling)

    def _uniforms(self, numbers: Sequence[int]) -> Tensor:
        return self._randomness(numbers, [self._turn[number] for number in numbers])

    def _grow(self, new_tokens: int) -> None:
        """Have room for longer sequences; where memory is short, in fewer slots."""
        decoder, width = self._decoder, width_for(new_tokens)
        count, before = decoder.capacity.num_slots, decoder.capacity.new_tokens
        model = decoder.model
        each = KeyShape.of(model).bytes_per_token(decoder.dtype) + 24
        if count * (width - before) * each > memory_budget(model.device):
            count = max(1, count * before // width)
        for sequence in self._scheduler.shrink(count):
            self._scheduler.waiting.appendleft((sequence.number, sequence.prompt))
        for number in [n for n in self._unread if n not in self._scheduler.paused]:
            del self._unread[number]
            self._scheduler.waiting.appendleft((number, self._prompts[number]))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # a captured step may still read the old ones
        decoder.grow(count, width)
