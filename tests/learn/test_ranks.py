"""Which rank computes what: all of it once, at about equal cost, groups whole where asked."""

import random

import pytest
import torch
from rank_jobs import batch as learned_batch

from posttrain.learn.ranks import ALONE, ATTENTION_COSTS_AS_MUCH, Ranks, cheapest, shares
from posttrain.types import Batch


def rows(lengths: list[int], *, prompts: list[int] | None = None, prompt: int = 1) -> Batch:
    """Sequences of these lengths; equal numbers of ``prompts`` begin with the same tokens."""
    width = max(lengths)
    tokens = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :prompt] = 7 + (row if prompts is None else prompts[row])
        mask[row, prompt:length] = True
    groups = torch.arange(len(lengths)) if prompts is None else torch.tensor(prompts)
    return Batch(tokens=tokens, mask=mask, groups=groups)


def cost(length: int) -> float:
    return length + length**2 / ATTENTION_COSTS_AS_MUCH


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_row_is_one_ranks_and_no_rank_has_much_more_to_do(size: int) -> None:
    """At most one sequence more than its share: the bound of longest first."""
    drawn = random.Random(0)
    lengths = [drawn.randint(2, 900) for _ in range(40)]
    found = shares(rows(lengths), size)
    assert sorted(row for mine in found for row in mine) == list(range(40))
    loads = [sum(cost(lengths[row]) for row in mine) for mine in found]
    assert max(loads) - min(loads) <= max(map(cost, lengths))
    assert max(loads) < 1.05 * sum(loads) / size


def test_attention_counts() -> None:
    """One sequence of 12,288 tokens costs as much as many short ones of twice as many."""
    found = shares(rows([ATTENTION_COSTS_AS_MUCH, *[1024] * 22]), 2)
    assert found[0] == [0]


def test_groups_stay_whole_where_asked_and_long_prompts_are_computed_once() -> None:
    prompts = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    lengths = [90, 85, 80, 84, 88, 83, 82, 86, 81, 87, 89, 91]
    whole = shares(rows(lengths, prompts=prompts), 2, keep_groups=True)
    together = shares(rows(lengths, prompts=prompts, prompt=78), 2)
    for found in (whole, together):
        owners = [{prompts[row] for row in mine} for mine in found]
        assert owners[0].isdisjoint(owners[1])
        assert sorted(row for mine in found for row in mine) == list(range(12))


def test_a_prompt_is_computed_twice_where_ranks_would_be_idle_else() -> None:
    found = shares(rows([90] * 4, prompts=[0] * 4, prompt=45), 4)
    assert [len(mine) for mine in found] == [1, 1, 1, 1]


def test_a_sequence_without_an_active_token_is_no_ranks() -> None:
    given = rows([4, 5, 6]).replace(valid=torch.tensor([True, False, True]))
    assert sorted(row for mine in shares(given, 2) for row in mine) == [0, 2]


def test_one_rank_alone_cuts_the_batch_as_it_is() -> None:
    given, seen = rows([4, 5]), []
    ALONE.cut(given, lambda whole: seen.append(whole) or [])
    assert seen[0] is given


def test_more_ranks_than_sequences_leave_some_without() -> None:
    assert [len(mine) for mine in shares(rows([4, 5]), 3)] == [1, 1, 0]
    assert Ranks(rank=2, size=3).mine(rows([4, 5])).tolist() == []


@pytest.mark.parametrize("kind", ["grpo", "reward"])
def test_the_cheapest_part_has_no_weight_and_is_complete(kind: str) -> None:
    given = learned_batch(kind)
    part = cheapest(given, keep_groups=kind == "reward")
    assert not part.need("weights").any()
    assert part.active.any(dim=1).all()
    if kind == "reward":
        assert part.groups is not None
        assert part.groups.tolist() == [1, 1]  # of five tokens, the shortest set
        assert part.tokens.shape == (2, 3)
    else:
        assert part.tokens.shape == (1, 3)  # the prompt and one token
