"""Who sits where: requests that wait, slots that run, prompts that are remembered."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.fast.kv_slots import Room

SMALLEST = 16  # rows of the smallest step


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A sequence in a slot; ``place`` is where its prompt is kept, ``first`` if it is new there."""

    number: int
    prompt: tuple[int, ...]
    slot: int
    place: int
    first: bool


class Desk:
    """Hands out slots in the order of the requests; equal prompts that follow share a place.

    A prompt keeps its place until all requests for it have ended, and at most one prompt is only
    partly seated. So one place more than there are slots is always enough.
    """

    def __init__(self, prompts: Mapping[int, tuple[int, ...]], room: Room) -> None:
        self.waiting = deque(prompts.items())
        self.running: dict[int, Seat] = {}
        self.free = list(range(room.num_slots))
        self._num_slots = room.num_slots
        self._left: dict[int, int] = {}
        self._unfinished = Counter(prompts.values())
        self._places: dict[tuple[int, ...], int] = {}
        self._free_places = list(range(room.num_prompts))

    @property
    def most_left(self) -> int:
        """The most tokens that any running request may still draw."""
        return max(self._left.values(), default=0)

    def seat(self, new_tokens: int) -> list[Seat]:
        """Give the free slots to the next requests; each draws its first token now."""
        seats = []
        while self.waiting and self.free:
            number, prompt = self.waiting[0]
            known = prompt in self._places
            if not known and not self._free_places:
                break
            self.waiting.popleft()
            if not known:
                self._places[prompt] = self._free_places.pop(0)
            seat = Seat(
                number=number,
                prompt=prompt,
                slot=self.free.pop(0),
                place=self._places[prompt],
                first=not known,
            )
            self.running[seat.slot] = seat
            self._left[seat.slot] = new_tokens - 1
            seats.append(seat)
        return seats

    def note(self, steps: int) -> None:
        """All running requests have drawn this many tokens more, unless they have ended."""
        for slot in self._left:
            self._left[slot] -= steps

    def closing_up(self, share: float) -> list[tuple[int, int]]:
        """Moves (from, to) that bring the running slots to the front.

        None while at least ``share`` of the slots up to the last running one are running.
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

    def leave(self, ended: Sequence[bool]) -> list[Seat]:
        """Free the slots that have ended, and the places of prompts that no one needs any more."""
        gone = [seat for slot, seat in self.running.items() if ended[slot]]
        for seat in gone:
            del self.running[seat.slot], self._left[seat.slot]
            bisect.insort(self.free, seat.slot)  # low slots are taken first: few gaps
            self._unfinished[seat.prompt] -= 1
            if not self._unfinished[seat.prompt]:
                self._free_places.append(self._places.pop(seat.prompt))
        return gone


def in_parts(
    prompts: Mapping[int, tuple[int, ...]], max_tokens: int
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """(place, prompt) in parts of at most ``max_tokens``, padding counted, longest first.

    >>> list(in_parts({0: (5,), 1: (6, 7), 2: (8, 9)}, 4))
    [[(1, (6, 7)), (2, (8, 9))], [(0, (5,))]]
    """
    part: list[tuple[int, tuple[int, ...]]] = []
    for place, prompt in sorted(prompts.items(), key=lambda item: -len(item[1])):
        if part and (len(part) + 1) * len(part[0][1]) > max_tokens:
            yield part
            part = []
        part.append((place, prompt))
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
