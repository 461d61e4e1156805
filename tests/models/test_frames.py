"""Packed rows in frames of fixed sizes: padding changes nothing, like batches have one frame."""

from typing import Any

import pytest
import torch
from exact_norms import with_exact_norms
from models.families import build
from models.test_states import CASES, batch
from torch import Tensor

from posttrain.models.block_attention import Block, Plain
from posttrain.models.frames import MOST, SELDOM, Frame, Framed, Frames, fit, frame_of, holds
from posttrain.models.packing import Packing, pack
from posttrain.models.recorded_pass import FramedAttention, _Pass
from posttrain.models.shared_prompt import Blocks
from posttrain.models.states import packed_states
from posttrain.types import Batch
from posttrain.types.prompts import spans


def blocks_of(framed: Framed) -> list[Block]:
    """The blocks of attention: within the first part, within the second, between them."""
    found = [Block(queries=framed.heads, keys=framed.heads, causal=True)]
    if framed.frame.rest:
        found.append(Block(queries=framed.rest, keys=framed.rest, causal=True))
        found.append(Block(queries=framed.groups, keys=framed.prompts, causal=False))
    return found


def framed_states(trunk: Any, tokens: Tensor, *, framed: Framed) -> Tensor:
    """The states of ``framed.before``, computed as a recording would."""
    heads, *others = (Plain(block, like=tokens) for block in blocks_of(framed))
    rest, given = others or (None, None)
    begin = framed.frame.heads
    blocks = Blocks(heads, rest, given, completions_begin=begin, prompts_end=begin)
    attention = FramedAttention(blocks, grouped=False)
    states = _Pass(trunk, attention, weights={})(tokens.flatten()[framed.source], framed.positions)
    return states[framed.before]


def packed(given: Batch) -> Packing:
    return pack(given, spans(given))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_states_and_gradients_are_those_without_padding(name: str, case: str) -> None:
    model = with_exact_norms(build(name))
    trunk, given = model.get_decoder(), batch(CASES[case])
    packing = packed(given)
    framed = fit(packing, frame_of(packing))
    results = []
    for states in (
        packed_states(trunk, given.tokens, packing=packing),
        framed_states(trunk, given.tokens, framed=framed),
    ):
        model.zero_grad()
        (states * torch.arange(states.numel()).view(states.shape).double().sin()).sum().backward()
        results.append((states, {n: p.grad for n, p in trunk.named_parameters()}))
    (expected, slopes), (found, others) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name_of, slope in slopes.items():
        torch.testing.assert_close(others[name_of], slope, rtol=1e-10, atol=1e-10, msg=name_of)


def rows(*, prompts: int, siblings: int, asked: int, answered: int) -> Batch:
    """Prompts of ``asked`` tokens, each with ``siblings`` completions of ``answered``."""
    numbers = torch.arange(prompts).repeat_interleave(siblings)
    prompt = (numbers[:, None] * 100 + torch.arange(asked)) % 1000
    count = prompts * siblings
    tokens = torch.cat([prompt, torch.arange(count * answered).view(count, -1) % 1000], 1)
    mask = torch.arange(asked + answered).expand(count, -1) >= asked
    return Batch(tokens=tokens, mask=mask)


def test_the_sizes_of_a_frame() -> None:
    """Multiples of 1,024 tokens and powers of two, with room for the padding as a sequence."""
    packing = packed(rows(prompts=4, siblings=8, asked=40, answered=101))
    assert frame_of(packing) == Frame(
        heads=256,  # 4 × 40 and at least one of padding
        rest=4096,  # 32 × 100, the last token is read by nobody
        num_heads=32,
        num_rest=64,  # 32 completions and up to eight pieces of padding
        num_groups=32,
        longest_head=128,
        longest_rest=128,
        longest_group=1024,
        longest_prompt=256,  # the padding sees all that stands behind the prompts
    )


def test_like_batches_share_a_frame() -> None:
    like = [
        rows(prompts=4, siblings=8, asked=asked, answered=answered)
        for asked, answered in ((40, 101), (36, 120), (50, 99))
    ]
    assert len({frame_of(packed(given)) for given in like}) == 1


def test_all_of_a_frame_is_some_sequence() -> None:
    """So that nothing is left unwritten by a kernel that goes by sequences."""
    packing = packed(rows(prompts=3, siblings=5, asked=7, answered=30))
    frame = frame_of(packing)
    framed = fit(packing, frame)
    assert sum(framed.heads) == sum(framed.prompts) == frame.heads
    assert sum(framed.rest) == sum(framed.groups) == frame.rest
    assert min(frame.heads - 3 * 7, frame.rest - 15 * 29) > 0
    assert len(framed.heads) == frame.num_heads
    assert len(framed.groups) == len(framed.prompts) == frame.num_groups
    assert max(framed.heads) <= frame.longest_head
    assert max(framed.rest) <= frame.longest_rest
    assert max(framed.groups) <= frame.longest_group
    assert max(framed.prompts) <= frame.longest_prompt


def test_nothing_shared_needs_no_second_part() -> None:
    packing = packed(rows(prompts=6, siblings=1, asked=7, answered=30))
    framed = fit(packing, frame_of(packing))
    assert framed.frame.rest == 0
    assert len(blocks_of(framed)) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_larger_frame_gives_the_same_states(case: str) -> None:
    """The padding is in few sequences then, each as long as the frame allows."""
    trunk, given = with_exact_norms(build("llama")).get_decoder(), batch(CASES[case])
    packing = packed(given)
    own = frame_of(packing)
    larger = own._replace(
        heads=1024, rest=own.rest and 1024, longest_prompt=1024, longest_group=own.rest and 300
    )
    assert holds(own, packing)
    assert holds(larger, packing)
    expected = packed_states(trunk, given.tokens, packing=packing)
    framed = fit(packing, larger)
    assert sum(framed.heads) == 1024
    assert max(framed.heads) <= larger.longest_head
    found = framed_states(trunk, given.tokens, framed=framed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_frame_too_small_in_any_way_does_not_hold() -> None:
    packing = packed(rows(prompts=10, siblings=2, asked=140, answered=301))
    least = Frame(
        heads=1401,  # one of padding, that is one more sequence
        rest=6001,
        num_heads=11,
        num_rest=21,
        num_groups=11,
        longest_head=140,
        longest_rest=300,
        longest_group=600,
        longest_prompt=2048,
    )
    assert holds(least, packing)
    for name in Frame._fields[:-1]:
        assert not holds(least._replace(**{name: getattr(least, name) - 1}), packing), name


def test_what_shares_nothing_and_what_does_have_other_frames() -> None:
    alone = packed(rows(prompts=6, siblings=1, asked=7, answered=30))
    shared = packed(rows(prompts=3, siblings=2, asked=7, answered=30))
    assert not holds(frame_of(shared), alone)
    assert not holds(frame_of(alone), shared)


def test_a_frame_is_taken_again_where_it_is_not_much_too_large() -> None:
    frames = Frames()
    sizes = (101, 97, 60)
    large, like, small = (
        packed(rows(prompts=4, siblings=8, asked=40, answered=answered)) for answered in sizes
    )
    first = frames.choose(large)
    assert frames.choose(like) == first
    # One that wastes a third is taken for a while; what comes often gets its own.
    chosen = [frames.choose(small) for _ in range(SELDOM + 2)]
    assert chosen == [first] * SELDOM + [frame_of(small)] * 2
    assert frames.known == [frame_of(large), frame_of(small)]


def test_there_are_not_more_frames_than_allowed() -> None:
    frames = Frames()
    packings = [
        packed(rows(prompts=1, siblings=2, asked=10, answered=600 * count))
        for count in range(1, 20)
    ]
    chosen = [frames.choose(packing) for packing in packings]
    assert len(frames.known) == MOST
    assert chosen[MOST:] == [None] * (len(packings) - MOST)
