"""Attention of the newest tokens on a CPU: completions of one prompt share a matrix product.

A step of a small model on a CPU waits for memory. So the keys of a prompt are read once for all its
completions, and those of the completions are read without a copy: rows are the first slots, without
gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.head import HALF

# Bytes. The keys of a slot and head are read whole, unused entries included (their scores are
# masked), where they take no more than this or half of them are used: one contiguous read is
# quicker than one for each slot.
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Which rows continue which prompt, as a table [prompts, most completions], padded.

    ``cells`` [P · G] is the row in each cell and ``back`` [n] the cell of each row, or None where
    the table is full and in order. ``start`` [n] is the length of the prompt of each row.
    ``prompts`` is a range of prompt indices without gaps, so that their keys need no copy; for a
    prompt in it that no row continues, the scores are computed and not used.
    """

    cells: Tensor | None
    back: Tensor | None
    prompts: slice
    start: Tensor
    longest: int

    @classmethod
    def of(cls, prompt: Tensor, prompt_length: Tensor) -> Grouping:
        """The table of rows that continue the prompts of these indices: [n], [n]."""
        first = int(prompt.min())
        group = (prompt - first).long()
        counts = group.bincount()
        order = group.argsort(stable=True)
        begin = counts.cumsum(0) - counts  # where each group begins in that order
        rows = torch.arange(len(group))
        within = torch.empty_like(group)
        within[order] = rows - begin[group[order]]
        most = int(counts.max())
        back = group * most + within
        full = bool((counts == most).all()) and torch.equal(back, rows)
        cells = torch.zeros(len(counts) * most, dtype=torch.long)
        cells[back] = rows
        return cls(
            cells=None if full else cells,
            back=None if full else back,
            prompts=slice(first, first + len(counts)),
            start=prompt_length.long(),
            longest=int(prompt_length.max()),
        )

    def by_prompt(self, states: Tensor) -> Tensor:
        """[n, …] → [P, G, …]."""
        count = self.prompts.stop - self.prompts.start
        cells = states if self.cells is None else states[self.cells]
        return cells.view(count, -1, *states.shape[1:])

    def by_row(self, states: Tensor) -> Tensor:
        """[P, G, …] → [n, …]."""
        cells = states.flatten(0, 1)
        return cells if self.back is None else cells[self.back]


class GroupedStep:
    """One step of the first n slots: what all layers share."""

    def __init__(self, grouping: Grouping, written: Tensor) -> None:
        self.grouping = grouping
        self.own = written.long()
        self.newest = int(self.own.max())
        self.even = bool((self.own == self.newest).all())
        self._hidden: dict[int, Tensor | None] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        prompt: tuple[Tensor, Tensor],
        completion: tuple[Tensor, Tensor],
        scale: float,
        window: int,
    ) -> Tensor:
        """As :func:`posttrain.fast.kv_slots.plain_decode_attention`, for the first n slots.

        ``prompt`` and ``completion`` are keys and values [P, K, prompt, D] and [S, K, new, D].
        Shapes: query [n, H, D], key and value [n, K, D] → [n, H, D].
        """
        for states, new in zip(completion, (key, value), strict=True):
            self._write(states, new)
        count, shared, size = key.shape
        kept = [states[self.grouping.prompts, :, : self.grouping.longest] for states in prompt]
        width, seen = completion[0].shape[2], self.newest + 1
        if width * size * key.element_size() > PAGE and width > 2 * seen:
            width = seen
        mine = [states[:count, :, :width] for states in completion]
        if query.dtype in HALF:  # stored in half precision, summed in float32
            query, kept, mine = query.float(), [s.float() for s in kept], [s.float() for s in mine]
        asked = (query * scale).view(count, shared, -1, size)
        longest = self.grouping.longest
        # [P, G, K, heads of a key, D] → [P, K, G · heads, prompt] → [n, K, heads, prompt]
        table = self.grouping.by_prompt(asked)
        siblings = table.shape[1]
        scores = table.transpose(1, 2).flatten(2, 3) @ kept[0].transpose(-1, -2)
        scores = scores.view(len(table), shared, siblings, -1, longest).transpose(1, 2)
        scores = torch.cat([self.grouping.by_row(scores), asked @ mine[0].transpose(-1, -2)], -1)
        scores[..., longest + seen :] = -torch.inf  # what is there was written by others, if at all
        hidden = self._hidden_from(window)
        if hidden is not None:
            scores[..., : longest + seen].masked_fill_(hidden[:, None, None], -torch.inf)
        shares = scores.softmax(-1)
        of_prompt = self.grouping.by_prompt(shares[..., :longest]).transpose(1, 2).flatten(2, 3)
        mixed = (of_prompt @ kept[1]).view(len(table), shared, siblings, -1, size).transpose(1, 2)
        mixed = self.grouping.by_row(mixed) + shares[..., longest:] @ mine[1]
        return mixed.flatten(1, 2).to(key.dtype)

    def _write(self, states: Tensor, new: Tensor) -> None:
        if self.even:
            states[: len(new), :, self.newest] = new
        else:
            states[torch.arange(len(new)), :, self.own] = new

    def _hidden_from(self, window: int) -> Tensor | None:
        """The keys that a row must not see, [n, prompt + own]; None where it sees all."""
        if window not in self._hidden:
            self._hidden[window] = self._compare(window)
        return self._hidden[window]

    def _compare(self, window: int) -> Tensor | None:
        start, longest = self.grouping.start, self.grouping.longest
        whole = bool((start == longest).all()) and self.even
        if whole and (not window or window > longest + self.newest):
            return None
        asked, answered = torch.arange(longest), torch.arange(self.newest + 1)
        real = torch.cat([asked < start[:, None], answered <= self.own[:, None]], 1)
        if window:
            position = torch.cat([asked.expand(len(start), -1), start[:, None] + answered], 1)
            real &= position > (start + self.own)[:, None] - window
        return ~real
