"""Cutting a batch: nothing is lost, nothing is seen twice, nothing real is trimmed away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.minibatch import MIN_COMPLETION_TO_PROMPT, micro_batches, minibatch_rows
from posttrain.types import Batch

Lengths = list[tuple[int, int]]  # tokens of the prompt, tokens of the completion
LENGTHS: Lengths = [(2, 3), (1, 1), (4, 0), (1, 7), (3, 2), (2, 3)]


def batch(lengths: Lengths, *, broken: tuple[int, ...] = ()) -> Batch:
    """Token t of row b is 100·b + t + 1, so that every token is known by its number."""
    width = max(prompt + answer for prompt, answer in lengths) + 2  # nobody fills the last columns
    place = torch.arange(width)
    rows = torch.arange(len(lengths))[:, None]
    prompt = torch.tensor([[p] for p, _ in lengths])
    end = torch.tensor([[p + a] for p, a in lengths])
    return Batch(
        tokens=torch.where(place < end, 100 * rows + place + 1, 0),
        mask=(place >= prompt) & (place < end),
        attention=place < end,
        rewards=rows[:, 0].double(),
        valid=torch.tensor([row not in broken for row in range(len(lengths))]),
        groups=rows[:, 0] // 2,
        advantages=(100 * rows + place + 1).double(),
    )


shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=9)


@given(lengths=shapes, max_tokens=st.integers(1, 60), data=st.data())
def test_micro_batches_hold_every_active_row_once(
    lengths: Lengths, max_tokens: int, data: st.DataObject
) -> None:
    """With all its tokens and its own fields, within the budget, padding counted."""
    broken = tuple(data.draw(st.sets(st.integers(0, len(lengths) - 1))))
    whole = batch(lengths, broken=broken)
    parts = micro_batches(whole, max_tokens)
    seen = [row for rows, _ in parts for row in rows.tolist()]
    active = [n for n, (_, answer) in enumerate(lengths) if answer and n not in broken]
    assert sorted(seen) == active
    for rows, part in parts:
        assert part.tokens.numel() <= max_tokens or len(rows) == 1
        assert part.rewards.tolist() == [float(row) for row in rows]
        width = part.tokens.shape[1]
        assert width == max(sum(lengths[row]) for row in rows.tolist())
        for index, row in enumerate(rows.tolist()):
            assert torch.equal(part.tokens[index], whole.tokens[row, :width])
            assert torch.equal(part.mask[index], whole.mask[row, :width])
            assert torch.equal(part.advantages[index], whole.advantages[row, :width])
            assert not bool(whole.attention[row, width:].any())


@given(lengths=shapes, max_tokens=st.integers(1, 60), names=st.lists(st.integers(0, 2), min_size=9))
def test_shared_prompts_are_counted_once(
    lengths: Lengths, max_tokens: int, names: list[int]
) -> None:
    """Every active row once and whole; within the budget; nobody is parted for a long prompt."""
    whole = batch(lengths)
    prompts = whole.attention & ~whole.mask
    place = torch.arange(whole.tokens.shape[1])
    alike = 1000 * torch.tensor(names[: len(lengths)])[:, None] + place
    whole = whole.replace(tokens=torch.where(prompts, alike, whole.tokens), groups=None)
    parts = micro_batches(whole, max_tokens, share_prompts=True)
    assert [rows.tolist() for rows, _ in parts] == [
        rows.tolist() for rows, _ in micro_batches(whole, max_tokens, share_prompts=True)
    ]
    seen = [row for rows, _ in parts for row in rows.tolist()]
    assert sorted(seen) == [row for row, (_, answer) in enumerate(lengths) if answer]

    def cost(rows: list[int]) -> int:
        distinct = {(names[row], lengths[row][0]) for row in rows}
        return sum(size for _, size in distinct) + sum(lengths[row][1] for row in rows)

    home = {}
    for number, (rows, part) in enumerate(parts):
        assert cost(rows.tolist()) <= max_tokens or len(rows) == 1
        assert part.tokens.shape[1] == max(sum(lengths[row]) for row in rows.tolist())
        assert torch.equal(part.tokens, whole.tokens[rows, : part.tokens.shape[1]])
        home |= dict.fromkeys(rows.tolist(), number)
    for row in seen:
        same = (names[row], lengths[row][0])
        siblings = [other for other in seen if (names[other], lengths[other][0]) == same]
        homes = sorted({home[sibling] for sibling in siblings})
        if cost(siblings) <= max_tokens and len(homes) > 1:
            assert len(homes) == 2
            filling = [lengths[other][1] for other in siblings if home[other] == homes[0]]
            assert sum(filling) >= MIN_COMPLETION_TO_PROMPT * lengths[row][0]


def test_a_group_is_parted_to_fill_a_part() -> None:
    """Three groups of four, 1 + 4·20 tokens each: 162 hold two, 142 one and three rows more."""
    tokens = torch.arange(12 * 21).reshape(12, 21)
    tokens[:, 0] = torch.arange(3).repeat_interleave(4)
    mask = (torch.arange(21) >= 1).expand(12, 21)

    groups = torch.arange(3).repeat_interleave(4)
    given = Batch(tokens=tokens, mask=mask, groups=groups)

    def rows(budget: int, **options: bool) -> list[list[int]]:
        parts = micro_batches(given, budget, share_prompts=True, **options)
        return [part.tolist() for part, _ in parts]

    first, second, third = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    assert rows(162) == [first + second, third]
    assert rows(142) == [[*first, 4, 5, 6], [7, *third]]
    assert rows(81) == [first, second, third]
    assert rows(142, keep_groups=True) == [first, second, third]


def test_groups_are_kept_whole_also_where_prompts_are_shared() -> None:
    """In their order, whatever the budget; both rows of a pair have the same prompt of four."""
    tokens = torch.arange(32).reshape(4, 8)
    tokens[:, :4] = tokens[::2, :4].repeat_interleave(2, dim=0)
    mask = torch.arange(8) >= 4
    pairs = Batch(tokens=tokens, mask=mask.expand(4, 8), groups=torch.tensor([5, 5, 6, 6]))

    def rows(budget: int) -> list[list[int]]:
        parts = micro_batches(pairs, budget, keep_groups=True, share_prompts=True)
        return [part.tolist() for part, _ in parts]

    assert rows(1) == rows(23) == [[0, 1], [2, 3]]
    assert rows(24) == [[0, 1, 2, 3]]  # 4 + 2·4 each, where padded rows would be 32


def test_micro_batches_by_hand() -> None:
    """Longest first, like with like: eight tokens; five and five; five and two, padded to five."""
    parts = micro_batches(batch(LENGTHS), 10)
    assert [rows.tolist() for rows, _ in parts] == [[3], [0, 4], [5, 1]]
    assert [tuple(part.tokens.shape) for _, part in parts] == [(1, 8), (2, 5), (2, 5)]


def test_rows_without_an_active_token_are_left_out() -> None:
    """Empty completions and broken graders cost no forward pass."""
    assert [rows.tolist() for rows, _ in micro_batches(batch(LENGTHS, broken=(3, 5)), 1000)] == [
        [0, 4, 1]
    ]
    assert micro_batches(batch([(4, 0)]), 10) == []


def test_without_attention_the_mask_says_how_long_a_row_is() -> None:
    (((row, part)),) = micro_batches(batch([(2, 3)]).replace(attention=None), 100)
    assert row.tolist() == [0]
    assert part.tokens.tolist() == [[1, 2, 3, 4, 5]]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch_tokens: must be at least 1, got 0"):
        micro_batches(batch(LENGTHS), 0)


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_minibatches_are_a_partition_in_every_epoch(count: int) -> None:
    """Of sizes that differ by one at most, larger ones first."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        r.tolist() for r in minibatch_rows(batch(LENGTHS), count, epochs=3, generator=generator)
    ]
    assert len(parts) == 3 * count
    for start in range(0, len(parts), count):
        epoch = parts[start : start + count]
        assert sorted(row for part in epoch for row in part) == [0, 1, 2, 3, 4, 5]
        sizes = [len(part) for part in epoch]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def test_every_epoch_is_shuffled_anew_by_the_generator() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(seed)
        parts = [
            r.tolist() for r in minibatch_rows(batch(LENGTHS), 2, epochs=4, generator=generator)
        ]
        return [parts[start : start + 2] for start in range(0, 8, 2)]

    assert epochs(0) == epochs(0)
    assert epochs(0) != epochs(1)
    assert len({str(epoch) for epoch in epochs(0)}) == 4


def test_one_minibatch_is_the_batch_in_its_own_order() -> None:
    parts = [rows.tolist() for rows in minibatch_rows(batch(LENGTHS), 1, epochs=2)]
    assert parts == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("count", [0, -1, 7])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and the 6 sequences, got {count}"):
        next(minibatch_rows(batch(LENGTHS), count))
