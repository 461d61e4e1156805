"""Packed rows in buckets of fixed sizes: padding changes nothing, like batches have one bucket."""

from typing import Any

import pytest
import torch
from fast.test_packed_states import CASES, batch
from models.families import build
from torch import Tensor

from posttrain.fast.attention.blockwise import Block, Plain
from posttrain.fast.attention.gathered import (
    Gathered,
    GatheredPrompts,
    KeySequences,
    sequences_of,
)
from posttrain.fast.buckets import MOST, PRICE, Bucket, Bucketed, Buckets, bucket_of, fit, holds
from posttrain.fast.captured_pass import _Pass
from posttrain.fast.packed_states import packed_states
from posttrain.fast.packing import Packing, pack
from posttrain.types import Batch
from posttrain.types.batch import spans


class Careless(Plain):
    """As FlashAttention: keys behind the last sequence may be there, and get any gradient."""

    def forward(
        self, query: Tensor, key: Tensor, *, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        seen = sum(self._block.keys)
        return super().forward(query, key[:seen], value=value[:seen], scale=scale)

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, ...], **given: Any
    ) -> tuple[Tensor, ...]:
        seen = sum(self._block.keys)
        first, *others = super().backward(
            gradient, (inputs[0], inputs[1][:seen], inputs[2][:seen]), **given
        )
        garbage = torch.full_like(inputs[1][seen:], torch.nan)
        return first, *(torch.cat([part, garbage]) for part in others)


def framed_states(trunk: Any, tokens: Tensor, *, bucketed: Bucketed) -> Tensor:
    """All states of a row, computed as a capture would."""
    block = Block(queries=bucketed.queries, keys=bucketed.keys, causal=True)
    gathered = Gathered(kernel=Careless(block, like=tokens), layout=bucketed.layout)
    run = _Pass(trunk, GatheredPrompts(gathered), weights={})
    return run(tokens.flatten()[bucketed.source], bucketed.positions)


def packed(given: Batch) -> Packing:
    return pack(given, spans(given))


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_states_and_gradients_are_those_without_padding(name: str, case: str) -> None:
    model = build(name)
    trunk, given = model.get_decoder(), batch(CASES[case])
    packing = packed(given)
    found = sequences_of(packing)
    bucketed = fit(packing, bucket_of(found), found=found)
    assert sum(bucketed.keys) < bucketed.bucket.keys  # some keys that nobody sees
    results = []
    for states in (
        packed_states(trunk, given.tokens, packing=packing),
        framed_states(trunk, given.tokens, bucketed=bucketed)[packing.before],
    ):
        model.zero_grad()
        (states * torch.arange(states.numel()).view(states.shape).double().sin()).sum().backward()
        results.append((states, {n: p.grad for n, p in trunk.named_parameters()}))
    (expected, gradients), (states, others) = results
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)
    for name_of, gradient in gradients.items():
        torch.testing.assert_close(others[name_of], gradient, rtol=1e-10, atol=1e-10, msg=name_of)


def rows(*, prompts: int, siblings: int, asked: int, answered: int) -> Batch:
    """Prompts of ``asked`` tokens, each with ``siblings`` completions of ``answered``."""
    numbers = torch.arange(prompts).repeat_interleave(siblings)
    prompt = (numbers[:, None] * 100 + torch.arange(asked)) % 1000
    count = prompts * siblings
    tokens = torch.cat([prompt, torch.arange(count * answered).view(count, -1) % 1000], 1)
    mask = torch.arange(asked + answered).expand(count, -1) >= asked
    return Batch(tokens=tokens, mask=mask)


def test_the_sizes_of_a_bucket() -> None:
    packing = packed(rows(prompts=4, siblings=8, asked=40, answered=101))
    assert bucket_of(sequences_of(packing)) == Bucket(
        tokens=3584,  # 4 × 40 and 32 × 100, for the last token is read by nobody; 7 × 512
        keys=8192,  # 160, 32 × 140, and 224 of padding
        sequences=64,  # 36, and one of padding
        longest=256,
    )


def test_like_batches_share_a_bucket() -> None:
    like = [
        rows(prompts=4, siblings=8, asked=asked, answered=answered)
        for asked, answered in ((40, 104), (36, 103), (50, 102))
    ]
    assert len({bucket_of(sequences_of(packed(given))) for given in like}) == 1


def test_all_of_a_row_is_some_sequence() -> None:
    """So that nothing is left unwritten by a kernel that goes by sequences."""
    packing = packed(rows(prompts=3, siblings=5, asked=7, answered=30))
    found = sequences_of(packing)
    bucket = bucket_of(found)
    bucketed = fit(packing, bucket, found=found)
    assert sum(bucketed.queries) == bucket.tokens > 3 * 7 + 15 * 29
    assert len(bucketed.queries) == len(bucketed.keys) == bucket.sequences
    assert max(bucketed.keys) <= bucket.longest
    assert len(bucketed.layout.at) == bucket.keys
    seen, behind = bucketed.layout.at.split([sum(bucketed.keys), bucket.keys - sum(bucketed.keys)])
    assert set(seen.tolist()) == set(range(bucket.tokens))
    assert set(behind.tolist()) == {bucket.tokens}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("case", CASES)
def test_a_larger_bucket_gives_the_same_states(case: str) -> None:
    trunk, given = build("llama").get_decoder(), batch(CASES[case])
    packing = packed(given)
    found = sequences_of(packing)
    own = bucket_of(found)
    larger = own._replace(tokens=1024, keys=1500)
    assert holds(own, found)
    assert holds(larger, found)
    expected = packed_states(trunk, given.tokens, packing=packing)
    bucketed = fit(packing, larger, found=found)
    assert sum(bucketed.queries) == 1024
    assert max(bucketed.queries) <= larger.longest
    states = framed_states(trunk, given.tokens, bucketed=bucketed)[packing.before]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)


def test_a_bucket_too_small_in_any_way_does_not_hold() -> None:
    found = sequences_of(packed(rows(prompts=10, siblings=2, asked=140, answered=301)))
    least = Bucket(
        tokens=7841,  # 1400, 6000, and 441 of padding, that is two more sequences
        keys=10641,  # 1400, 20 × 440, and the padding
        sequences=32,
        longest=440,
    )
    assert holds(least, found)
    for name in Bucket._fields[1:]:
        less = least._replace(**{name: getattr(least, name) - 1})
        assert not holds(less, found), name
    assert holds(least._replace(tokens=7400), found)
    assert not holds(least._replace(tokens=7399), found)


def chosen(buckets: Buckets, found: KeySequences, *, new: bool = True) -> Bucket | None:
    """Choose, and record what is new."""
    bucket = buckets.choose(found, new=new)
    if bucket is not None and bucket not in buckets.known:
        buckets.known.append(bucket)
    return bucket


def test_a_bucket_is_taken_again_until_the_waste_would_have_paid_for_another() -> None:
    buckets = Buckets()
    large, like, small = (
        sequences_of(packed(rows(prompts=4, siblings=8, asked=40, answered=answered)))
        for answered in (101, 99, 60)
    )
    first = chosen(buckets, large)
    assert chosen(buckets, like) == first
    own = bucket_of(small)
    assert (first.tokens, own.tokens) == (3584, 2048)
    work = [bucket.tokens + bucket.keys // 64 for bucket in (first, own)]
    times = PRICE * work[1] // (work[0] - work[1])
    assert [chosen(buckets, small) for _ in range(times + 2)] == [first] * times + [own] * 2
    assert buckets.known == [first, own]


def test_keys_that_nobody_sees_are_waste_too() -> None:
    buckets = Buckets()
    many, few = (
        sequences_of(packed(rows(prompts=prompts, siblings=64 // prompts, asked=p, answered=n)))
        for prompts, p, n in ((1, 500, 30), (4, 16, 35))
    )
    first = chosen(buckets, many)
    own = bucket_of(few)
    assert first.tokens == 2560 >= own.tokens
    assert first.keys > 8 * own.keys
    assert [chosen(buckets, few) for _ in range(200)][-1] == own


def test_there_are_not_more_buckets_than_allowed() -> None:
    buckets = Buckets()
    longer = [
        sequences_of(packed(rows(prompts=1, siblings=2, asked=10, answered=int(100 * 1.3**count))))
        for count in range(19)
    ]
    taken = [chosen(buckets, found) for found in longer]
    assert len(buckets.known) == MOST
    assert taken[MOST:] == [None] * (len(longer) - MOST)


def test_what_is_only_looked_at_gets_no_bucket_of_its_own() -> None:
    buckets = Buckets()
    small, large = (
        sequences_of(packed(rows(prompts=4, siblings=8, asked=40, answered=answered)))
        for answered in (60, 101)
    )
    assert chosen(buckets, small, new=False) is None
    first = chosen(buckets, small)
    assert chosen(buckets, small, new=False) == first
    assert chosen(buckets, large, new=False) is None
    assert buckets.known == [first]


def test_long_prompts_of_short_completions_are_not_copied() -> None:
    """64 × 3,015 keys for 3,960 tokens."""
    long, usual = (
        sequences_of(packed(rows(prompts=1, siblings=64, asked=asked, answered=16)))
        for asked in (3000, 40)
    )
    assert len(long.keys_at) == 3000 + 64 * 3015
    assert not long.gather_pays_off
    assert usual.gather_pays_off
