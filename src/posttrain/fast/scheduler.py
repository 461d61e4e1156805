"""The scheduler: which sequences wait, which run in which slot, which prompts are in the cache."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.fast.kv_slots import Capacity

SMALLEST = 16  # rows of the smallest step


@dataclass(frozen=True, kw_only=True)
class ScheduledSequence:
    """A sequence in a slot; ``index`` is that of its prompt, ``first`` if it must be read."""

    number: int
    prompt: tuple[int, ...]
    slot: int
    index: int
    first: bool


class Scheduler:
    """Gives slots to sequences in their order; sequences with the same prompt share its index.

    A prompt keeps its index until all its sequences have ended. Equal prompts come one after the
    other, so at most one prompt has sequences that still wait, and one index more than there are
    slots is always enough. Sequences of several turns come back in any order: a prompt that none in
    a slot continues then gives its index to another, and is read again.
    """

    def __init__(self, prompts: Mapping[int, tuple[int, ...]], capacity: Capacity) -> None:
        self.waiting = deque(prompts.items())
        self.running: dict[int, ScheduledSequence] = {}
        self.paused: dict[int, ScheduledSequence] = {}  # by number: in slots, between two turns
        self.free = list(range(capacity.num_slots))
        self._num_slots = capacity.num_slots
        self._left: dict[int, int] = {}
        self._unfinished = Counter(prompts.values())
        self._prompt_index: dict[tuple[int, ...], int] = {}
        self._free_prompts = list(range(capacity.num_prompts))

    @property
    def most_left(self) -> int:
        """The most tokens that any running sequence may still draw."""
        return max(self._left.values(), default=0)

    def admit(self, new_tokens: int) -> list[ScheduledSequence]:
        """Give the free slots to the next sequences; each draws its first token now."""
        sequences = []
        while self.waiting and self.free:
            number, prompt = self.waiting[0]
            known = prompt in self._prompt_index
            if not known and not self._free_prompts and not self._evict():
                break
            self.waiting.popleft()
            if not known:
                self._prompt_index[prompt] = self._free_prompts.pop(0)
            sequence = ScheduledSequence(
                number=number,
                prompt=prompt,
                slot=self.free.pop(0),
                index=self._prompt_index[prompt],
                first=not known,
            )
            self.running[sequence.slot] = sequence
            self._left[sequence.slot] = new_tokens - 1
            sequences.append(sequence)
        return sequences

    def advance(self, steps: int) -> None:
        """Count that all running sequences have taken this many steps more."""
        for slot in self._left:
            self._left[slot] -= steps

    def compact(self, share: float) -> list[tuple[int, int]]:
        """Moves (from, to) that bring the running slots to the front.

        No moves while more than ``share`` of the slots up to the last running one are running.
        """
        count = len(self.running)
        if count > share * (1 + max(self.running)):
            return []
        holes = [slot for slot in range(count) if slot not in self.running]
        behind = [slot for slot in self.running if slot >= count]
        moves = list(zip(behind, holes, strict=True))
        for source, target in moves:
            self.running[target] = dataclasses.replace(self.running.pop(source), slot=target)
            self._left[target] = self._left.pop(source)
        self.free = [slot for slot in range(self._num_slots) if slot not in self.running]
        return moves

    def release(self, ended: Sequence[bool]) -> list[ScheduledSequence]:
        """Free the slots that have ended, and prompts that no sequence needs any more."""
        gone = self.pause(ended)
        for sequence in gone:
            self.drop(sequence.number)
            self.finish(sequence.prompt)
        return gone

    def pause(self, ended: Sequence[bool]) -> list[ScheduledSequence]:
        """The sequences that have ended their turn: they keep their slots, and run no more."""
        gone = [sequence for slot, sequence in self.running.items() if ended[slot]]
        for sequence in gone:
            del self.running[sequence.slot], self._left[sequence.slot]
            self.paused[sequence.number] = sequence
        return gone

    def resume(self, number: int, new_tokens: int) -> ScheduledSequence:
        """Let a paused sequence run again; it draws the first token of its turn now."""
        sequence = self.paused.pop(number)
        self.running[sequence.slot] = sequence
        self._left[sequence.slot] = new_tokens - 1
        return sequence

    def drop(self, number: int) -> None:
        """Free the slot of a paused sequence."""
        sequence = self.paused.pop(number)
        bisect.insort(self.free, sequence.slot)  # low slots first, so that there are few gaps

    def finish(self, prompt: tuple[int, ...]) -> None:
        """Count that a sequence of this prompt is over, and free a prompt that no other needs."""
        self._unfinished[prompt] -= 1
        if not self._unfinished[prompt] and prompt in self._prompt_index:
            self._free_prompts.append(self._prompt_index.pop(prompt))

    def shrink(self, num_slots: int) -> list[ScheduledSequence]:
        """Keep the first slots alone; the running sequences that have lost theirs."""
        lost = [sequence for slot, sequence in self.running.items() if slot >= num_slots]
        for sequence in lost:
            del self.running[sequence.slot], self._left[sequence.slot]
        for number in [n for n, sequence in self.paused.items() if sequence.slot >= num_slots]:
            del self.paused[number]
        self.free = [slot for slot in self.free if slot < num_slots]
        self._num_slots = num_slots
        return lost

    def _evict(self) -> bool:
        """Free the index of a prompt that no sequence in a slot continues, if there is one."""
        used = {sequence.prompt for sequence in (*self.running.values(), *self.paused.values())}
        prompt = next((prompt for prompt in self._prompt_index if prompt not in used), None)
        if prompt is not None:
            self._free_prompts.append(self._prompt_index.pop(prompt))
        return prompt is not None


def prefill_parts(
    prompts: Mapping[int, tuple[int, ...]], max_tokens: int
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """(index, prompt) in parts of at most ``max_tokens``, padding counted, longest first.

    >>> list(prefill_parts({0: (5,), 1: (6, 7), 2: (8, 9)}, 4))
    [[(1, (6, 7)), (2, (8, 9))], [(0, (5,))]]
    """
    part: list[tuple[int, tuple[int, ...]]] = []
    for index, prompt in sorted(prompts.items(), key=lambda item: -len(item[1])):
        if part and (len(part) + 1) * len(part[0][1]) > max_tokens:
            yield part
            part = []
        part.append((index, prompt))
    if part:
        yield part


def rows_for(count: int, limit: int) -> int:
    """Rows of the smallest step that takes ``count``: powers of two and half of the way between.

    >>> [rows_for(count, 500) for count in (1, 17, 33, 50, 400)]
    [16, 24, 48, 64, 500]
    """
    size = SMALLEST
    while size < count:
        size = size // 2 * 3 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, limit)
